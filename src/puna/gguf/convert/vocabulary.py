"""Vocabularies of text models, from the files of a checkpoint to the keys of a GGUF file.

BPE comes from tokenizer.json, of bytes or of characters with bytes for those that it lacks; SentencePiece from
tokenizer.model, or from a tokenizer.json that was made of one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from puna.errors import FileFormatError, UnsupportedModel
from puna.gguf.convert import sentencepiece
from puna.gguf.convert.checkpoint import Checkpoint, Tensors
from puna.gguf.convert.cutting import check_normalizer, cut_by, spaces_of, steps_of
from puna.gguf.types import ValueType
from puna.gguf.writer import GGUFWriter

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # token types as GGUF numbers them

MAX_TOKENS = 1 << 22


class _AddedToken(msgspec.Struct, frozen=True):
    id: int
    content: str
    special: bool = False


class _BPE(msgspec.Struct, frozen=True):
    vocab: dict[str, int] = {}
    merges: list[str | list[str]] = []
    type: str = ""
    byte_fallback: bool | None = False
    ignore_merges: bool | None = False
    unk_token: str | None = None


class _TokenizerFile(msgspec.Struct, frozen=True):
    """The part of tokenizer.json that matters."""

    model: _BPE = _BPE()
    added_tokens: list[_AddedToken] = []
    normalizer: Any = None
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


class _Generation(msgspec.Struct, frozen=True):
    """The part of generation_config.json that matters."""

    eos_token_id: int | list[int] | None = None


class _Template(msgspec.Struct, frozen=True):
    """chat_template.json"""

    chat_template: str = ""


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
    ends: list[int] = field(default_factory=list)  # all tokens that end an answer, where there are several
    chat_template: str = ""

    def number_of(self, text: str) -> int | None:
        token = text.encode()
        return self.tokens.index(token) if token in self.tokens else None

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
        if self.ends:
            writer.add("tokenizer.ggml.eos_token_ids", self.ends, element=ValueType.UINT32)
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
        vocabulary = _characters(file, n_tokens) if file.model.byte_fallback else _byte_level(file, n_tokens)
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
    vocabulary.ends = _ends(checkpoint, vocabulary, ids)
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
    if model.type != "BPE":
        raise UnsupportedModel(f"tokenizer.json: {model.type[:40] or 'nothing'!r} cannot be converted, only BPE can")
    check_normalizer(file.normalizer)
    tokens, kinds = _padded(n_tokens)
    for text, number in model.vocab.items():
        _put(tokens, kinds, number, text.encode("utf-8", "replace"), NORMAL, "tokenizer.json")
    _put_added(tokens, kinds, file.added_tokens, "tokenizer.json")
    return Vocabulary("gpt2", cut_by(file.pre_tokenizer, bool(model.ignore_merges)), tokens, kinds, merges=_merges(model))


def _merges(model: _BPE) -> list[str]:
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model.merges]
    if any(pair.count(" ") != 1 for pair in merges):
        raise FileFormatError("tokenizer.json: a merge that is no pair")
    return merges


_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def _characters(file: _TokenizerFile, n_tokens: int) -> Vocabulary:
    """BPE of characters, as SentencePiece has it, with tokens of bytes for characters that are none.

    With a space before every text it is SentencePiece's in all, whose scores are in the order of merges; without one GGUF
    has a kind of its own, which merges by rank.
    """
    model = file.model
    if model.type != "BPE":
        raise UnsupportedModel(f"tokenizer.json: {model.type[:40]!r} cannot be converted, only BPE can")
    begins = spaces_of(file.normalizer, file.pre_tokenizer)
    tokens, kinds = _padded(n_tokens)
    for text, number in model.vocab.items():
        kind = BYTE if _BYTE.fullmatch(text) else NORMAL
        _put(tokens, kinds, number, text.encode("utf-8", "replace"), kind, "tokenizer.json")
    unknown = model.vocab.get(model.unk_token or "", -1)
    if 0 <= unknown < n_tokens:
        kinds[unknown] = UNKNOWN
    added = [token for token in file.added_tokens if token.id != unknown]
    for token in added:  # they are among the pieces too
        if 0 <= token.id < n_tokens and tokens[token.id] == token.content.encode("utf-8", "replace"):
            kinds[token.id] = UNUSED
    _put_added(tokens, kinds, added, "tokenizer.json")
    merges = _merges(model)
    if not begins:
        return Vocabulary("gemma4", "gemma4", tokens, kinds, scores=[0.0] * n_tokens, merges=merges)
    ranks: dict[bytes, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault(pair.replace(" ", "").encode("utf-8", "replace"), rank)
    scores = [-float(ranks.get(token, 1 << 22)) for token in tokens]
    return Vocabulary("llama", "default", tokens, kinds, scores=scores, flags={"add_space_prefix": True})


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


def _begins_with_special(post_processor: Any) -> bool:
    """Whether a special token is put before every text."""
    for step in steps_of(post_processor, "processors"):
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


def _ends(checkpoint: Checkpoint, vocabulary: Vocabulary, ids: Mapping[str, Any]) -> list[int]:
    """What ends an answer by any of the files, the tokenizer's first; empty where there is one alone.

    Errors: FileFormatError for a token that is none.
    """
    stated = [vocabulary.specials["eos"]] if "eos" in vocabulary.specials else []
    places = {"config.json": ids.get("eos_token_id")}
    if checkpoint.has("generation_config.json"):
        places["generation_config.json"] = checkpoint.decoded("generation_config.json", _Generation).eos_token_id
    for name, found in places.items():
        for token in found if isinstance(found, list) else [] if found is None else [found]:
            if not isinstance(token, int) or not 0 <= token < len(vocabulary.tokens):
                raise FileFormatError(f"{name}: eos_token_id has {str(token)[:40]}, which is no token")
            stated.append(token)
    distinct = list(dict.fromkeys(stated))
    return distinct if len(distinct) > 1 else []


def _chat_template(checkpoint: Checkpoint, settings: _TokenizerConfig) -> str:
    if checkpoint.has("chat_template.jinja"):
        return checkpoint.read("chat_template.jinja").decode("utf-8", "replace")
    if isinstance(settings.chat_template, list):  # several, by name
        named = {str(item.get("name")): item.get("template") for item in settings.chat_template}
        template = named.get("default")
        return template if isinstance(template, str) else ""
    if not settings.chat_template and checkpoint.has("chat_template.json"):  # beside a processor of images
        return checkpoint.decoded("chat_template.json", _Template).chat_template
    return settings.chat_template or ""
