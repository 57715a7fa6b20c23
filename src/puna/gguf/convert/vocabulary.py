"""Vocabularies of text models, from the files of a checkpoint to the keys of a GGUF file.

Byte-level BPE comes from tokenizer.json, SentencePiece from tokenizer.model. How text is cut before merging is named by
llama.cpp's word for it (``tokenizer.ggml.pre``); a way of cutting that has no such name is refused, because the wrong one
gives other tokens without any error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from puna.errors import FileFormatError, UnsupportedModel
from puna.gguf.convert import sentencepiece
from puna.gguf.convert.checkpoint import Checkpoint, Tensors
from puna.gguf.types import ValueType
from puna.gguf.writer import GGUFWriter

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # token types as GGUF numbers them

MAX_TOKENS = 1 << 22

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_PATTERNS = {  # the expression that cuts the text, as tokenizer.json files have it
    rf"{_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}": "llama-bpe",
    rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}": "qwen2",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}": "tekken",
}


class _AddedToken(msgspec.Struct, frozen=True):
    id: int
    content: str
    special: bool = False


class _BPE(msgspec.Struct, frozen=True):
    vocab: dict[str, int] = {}
    merges: list[str | list[str]] = []
    type: str = ""
    byte_fallback: bool | None = False


class _TokenizerFile(msgspec.Struct, frozen=True):
    """The part of tokenizer.json that matters."""

    model: _BPE = _BPE()
    added_tokens: list[_AddedToken] = []
    pre_tokenizer: Any = None
    post_processor: Any = None


class _TokenizerConfig(msgspec.Struct, frozen=True):
    """The part of tokenizer_config.json that matters; a token is its text, or an object with it as content."""

    bos_token: str | dict[str, Any] | None = None
    eos_token: str | dict[str, Any] | None = None
    unk_token: str | dict[str, Any] | None = None
    pad_token: str | dict[str, Any] | None = None
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    chat_template: str | list[dict[str, Any]] | None = None


_ROLES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}  # GGUF's names and the checkpoint's


@dataclass
class Vocabulary:
    """Tokens by number with their types, and what else the file must say about them."""

    model: str
    pre: str
    tokens: list[bytes]
    kinds: list[int]
    scores: list[float] = field(default_factory=list)
    merges: list[str] = field(default_factory=list)
    specials: dict[str, int] = field(default_factory=dict)  # by role
    flags: dict[str, bool] = field(default_factory=dict)
    chat_template: str = ""

    def add_to(self, writer: GGUFWriter) -> None:
        writer.add("tokenizer.ggml.model", self.model)
        writer.add("tokenizer.ggml.pre", self.pre)
        writer.add("tokenizer.ggml.tokens", self.tokens, element=ValueType.STRING)
        writer.add("tokenizer.ggml.token_type", self.kinds, element=ValueType.INT32)
        if self.scores:
            writer.add("tokenizer.ggml.scores", self.scores, element=ValueType.FLOAT32)
        if self.merges:
            writer.add("tokenizer.ggml.merges", self.merges, element=ValueType.STRING)
        for role, token in self.specials.items():
            writer.add(f"tokenizer.ggml.{role}_token_id", token, ValueType.UINT32)
        for name, value in self.flags.items():
            writer.add(f"tokenizer.ggml.{name}", value)
        if self.chat_template:
            writer.add("tokenizer.chat_template", self.chat_template)


def read(checkpoint: Checkpoint, n_tokens: int, ids: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary for a table of *n_tokens* embeddings; rows without a token get an unused one.

    *ids* are the numbers of special tokens that config.json gives, where the tokenizer's files do not: ``bos_token_id``, …
    Errors: FileFormatError naming the file; UnsupportedModel for a kind of tokenizer that cannot be converted.
    """
    file = checkpoint.decoded("tokenizer.json", _TokenizerFile) if checkpoint.has("tokenizer.json") else _TokenizerFile()
    settings = _TokenizerConfig()
    if checkpoint.has("tokenizer_config.json"):
        settings = checkpoint.decoded("tokenizer_config.json", _TokenizerConfig)
    if checkpoint.has("tokenizer.model"):
        vocabulary = _sentencepiece(checkpoint, file, n_tokens)
        begins = True
    elif checkpoint.has("tokenizer.json"):
        vocabulary = _byte_level(file, n_tokens)
        begins = _begins_with_special(file.post_processor)
    else:
        raise FileFormatError("the checkpoint has neither tokenizer.json nor tokenizer.model")
    if len(set(vocabulary.tokens)) < n_tokens:
        twice = next(token for token, count in Counter(vocabulary.tokens).items() if count > 1)
        raise FileFormatError(f"the tokenizer has the token {twice[:40]!r} twice")
    vocabulary.flags["add_bos_token"] = begins if settings.add_bos_token is None else settings.add_bos_token
    vocabulary.flags["add_eos_token"] = bool(settings.add_eos_token)
    vocabulary.specials = _specials(vocabulary.tokens, settings, ids)
    if "bos" not in vocabulary.specials:
        vocabulary.flags["add_bos_token"] = False
    vocabulary.chat_template = _chat_template(checkpoint, settings)
    return vocabulary


def n_embeddings(tensors: Tensors, table: str, width: int) -> int:
    """Rows of the table of embeddings.

    Errors: FileFormatError naming file and tensor.
    """
    shape = tensors.stored(table).shape
    if len(shape) != 2 or shape[1] != width or not 0 < shape[0] <= MAX_TOKENS:
        raise FileFormatError(
            f"{tensors.home(table).name}: tensor {table} has the shape {list(shape)}, not up to {MAX_TOKENS} rows of {width}"
        )
    return shape[0]


def _byte_level(file: _TokenizerFile, n_tokens: int) -> Vocabulary:
    model = file.model
    if model.type != "BPE" or model.byte_fallback:
        kind = "BPE with bytes as a fallback" if model.byte_fallback else model.type or "nothing"
        raise UnsupportedModel(
            f"tokenizer.json: {kind!r} cannot be converted, only byte-level BPE can; for SentencePiece add tokenizer.model"
        )
    tokens, kinds = _padded(n_tokens)
    for text, number in model.vocab.items():
        _put(tokens, kinds, number, text.encode("utf-8", "replace"), NORMAL, "tokenizer.json")
    _put_added(tokens, kinds, file.added_tokens, "tokenizer.json")
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model.merges]
    if any(pair.count(" ") != 1 for pair in merges):
        raise FileFormatError("tokenizer.json: a merge that is no pair")
    return Vocabulary("gpt2", _pre(file.pre_tokenizer), tokens, kinds, merges=merges)


def _sentencepiece(checkpoint: Checkpoint, file: _TokenizerFile, n_tokens: int) -> Vocabulary:
    name = "tokenizer.model"
    model = sentencepiece.read(checkpoint.read(name), name)
    tokens, kinds = _padded(n_tokens)
    scores = [-1000.0] * n_tokens  # of what is not in the model: never chosen over a piece that is
    for number, piece in enumerate(model.pieces):
        _put(tokens, kinds, number, piece.text, piece.kind, name)
        scores[number] = piece.score
    added = file.added_tokens
    if not added and checkpoint.has("added_tokens.json"):
        found = checkpoint.decoded("added_tokens.json", dict[str, int])
        added = [_AddedToken(number, text) for text, number in found.items()]
    for token in added:  # some that are special count as text in tokenizer.model
        if 0 <= token.id < len(model.pieces) and token.special and kinds[token.id] in (NORMAL, USER_DEFINED):
            kinds[token.id] = CONTROL
    _put_added(tokens, kinds, [token for token in added if token.id >= len(model.pieces)], "the added tokens")
    flags = {"add_space_prefix": model.adds_space_prefix}
    return Vocabulary("llama", "default", tokens, kinds, scores=scores, flags=flags)


def _padded(n_tokens: int) -> tuple[list[bytes], list[int]]:
    return [f"[PAD{number}]".encode() for number in range(n_tokens)], [UNUSED] * n_tokens


def _put(tokens: list[bytes], kinds: list[int], number: int, text: bytes, kind: int, file: str) -> None:
    if not 0 <= number < len(tokens):
        raise FileFormatError(f"{file}: token {text[:40]!r} has the number {number}, the model has {len(tokens)} embeddings")
    if kinds[number] != UNUSED and tokens[number] != text:
        raise FileFormatError(f"{file}: tokens {tokens[number][:40]!r} and {text[:40]!r} have the same number {number}")
    tokens[number], kinds[number] = text, kind


def _put_added(tokens: list[bytes], kinds: list[int], added: Iterable[_AddedToken], file: str) -> None:
    for token in added:
        text = token.content.encode("utf-8", "replace")
        _put(tokens, kinds, token.id, text, CONTROL if token.special else USER_DEFINED, file)


def _pre(pre_tokenizer: Any) -> str:
    """Llama.cpp's name of how the text is cut.

    Errors: UnsupportedModel quoting what has no name.
    """
    steps = _steps(pre_tokenizer, "pretokenizers")
    if steps and steps[-1].get("type") == "ByteLevel" and not steps[-1].get("add_prefix_space"):
        before = steps[:-1]
        has_default_pattern = steps[-1].get("use_regex", True)
        if not before and has_default_pattern:
            return "gpt-2"
        if len(before) == 1 and before[0].get("type") == "Digits" and before[0].get("individual_digits") and has_default_pattern:
            return "smollm"
        if len(before) == 1 and before[0].get("type") == "Split" and not has_default_pattern:
            pattern = before[0].get("pattern")
            name = _PATTERNS.get(str(pattern.get("Regex"))) if isinstance(pattern, dict) else None
            if name is not None and before[0].get("behavior") == "Isolated" and not before[0].get("invert"):
                return name
    shown = msgspec.json.encode(pre_tokenizer).decode("utf-8", "replace")
    raise UnsupportedModel(f"tokenizer.json: this pre_tokenizer is not known: {shown[:500]}")


def _steps(processor: Any, name: str) -> list[dict[str, Any]]:
    """The parts of a tokenizer's component: those of a sequence, or the one it is."""
    if not isinstance(processor, dict):
        return []
    if processor.get("type") != "Sequence":
        return [processor]
    parts = processor.get(name)
    return [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []


def _begins_with_special(post_processor: Any) -> bool:
    """Whether a special token is put before every text."""
    for step in _steps(post_processor, "processors"):
        template = step.get("single")
        if step.get("type") == "TemplateProcessing" and isinstance(template, list) and template:
            return isinstance(template[0], dict) and "SpecialToken" in template[0]
    return False


def _specials(tokens: list[bytes], settings: _TokenizerConfig, ids: Mapping[str, Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    for role, theirs in _ROLES.items():
        stated = getattr(settings, f"{theirs}_token")
        text = stated.get("content") if isinstance(stated, dict) else stated
        number = ids.get(f"{theirs}_token_id")
        number = number[0] if isinstance(number, list) and number else number
        if isinstance(text, str) and text.encode("utf-8", "replace") in tokens:
            found[role] = tokens.index(text.encode("utf-8", "replace"))
        elif isinstance(number, int) and 0 <= number < len(tokens):
            found[role] = number
    return found


def _chat_template(checkpoint: Checkpoint, settings: _TokenizerConfig) -> str:
    if checkpoint.has("chat_template.jinja"):
        return checkpoint.read("chat_template.jinja").decode("utf-8", "replace")
    if isinstance(settings.chat_template, list):  # several, by name
        named = {str(item.get("name")): item.get("template") for item in settings.chat_template}
        template = named.get("default")
        return template if isinstance(template, str) else ""
    return settings.chat_template or ""
