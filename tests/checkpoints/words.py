"""Tokenizer files of each kind that is published, over the vocabularies of tests.tiny, and texts to be cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.hf import LLAMA3_PATTERN, QWEN2_PATTERN, added_token, tokenizer_json
from tests.tiny import BYTE, CONTROL, bpe_vocabulary, spm_vocabulary

TEXTS = [
    "Hello world, don't you think it's 12345.678 times? YOU'LL see…",
    "  leading spaces\tand\ttabs\n\n\nlines \r\n  of code:\n    if (x >= 10) { return a[0]; }  ",
    "Ünïcödé naïve CAFÉ Ça va? Straße McDonald iPhone HTTPServer",
    "数字123和中文。ひらがなカタカナ 한국어 текст हिन्दी ภาษาไทย العربية",
    "🦊👩‍🚀 emoji/slashes//http://a.b/c?d=e&f=g#h $3.50 +=<>~|^`",
    "the quick brown fox jumps over the lazy dog",
    "",
    " ",
    "a\u0301b e\u0301 \u00a0nbsp",
    "'s 't 'RE I'M we've",
]

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_END = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split(pattern: str, behavior: str = "Isolated", *, invert: bool = False) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}


def _bytes(*steps: dict[str, Any], default: bool = False) -> dict[str, Any]:
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": default}
    return {"type": "Sequence", "pretokenizers": [*steps, last]} if steps else last


def _cased(end: str, digits: str) -> str:
    words = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{end}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{end}"
    return words + "|" + digits + _REST


_DEEPSEEK = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
_DEEPSEEK += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_CL100K = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# How text is cut, whether words that are tokens stay whole, and llama.cpp's word for it.
CUTS: dict[str, tuple[dict[str, Any], bool, str]] = {
    "llama-3": (_bytes(_split(LLAMA3_PATTERN)), True, "llama-bpe"),
    "llama-3-merging": (_bytes(_split(LLAMA3_PATTERN)), False, "dbrx"),
    "gpt-4": (_bytes(_split(_CL100K, "Removed", invert=True)), False, "dbrx"),
    "gpt-4o": (_bytes(_split(_cased(_END, r"\p{N}{1,3}"))), False, "gpt-4o"),
    "tekken": (_bytes(_split(_cased("", r"\p{N}"))), True, "tekken"),
    "qwen-2": (_bytes(_split(QWEN2_PATTERN)), False, "qwen2"),
    "qwen-3.5": (_bytes(_split(_QWEN35)), False, "qwen35"),
    "deepseek-3": (_bytes(_split(r"\p{N}{1,3}"), _split("[一-龥\u3040-ゟ゠-ヿ]+"), _split(_DEEPSEEK)), False, "deepseek-v3"),
    "digits": (_bytes({"type": "Digits", "individual_digits": True}, default=True), False, "smollm"),
    "gpt-2": (_bytes(default=True), False, "gpt-2"),
}

_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_PREPEND = {"type": "Prepend", "prepend": "▁"}
# Of characters: the normalizer, what cuts, and GGUF's kind.
MARKS: dict[str, tuple[Any, Any, str]] = {
    "gemma": (
        _REPLACE,
        {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
        "gemma4",
    ),
    "llama-2": ({"type": "Sequence", "normalizers": [_PREPEND, _REPLACE]}, None, "llama"),
    "metaspace": (None, {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": False}, "gemma4"),
}


def of_bytes(kind: str) -> dict[str, Any]:
    found = tokenizer_json(bpe_vocabulary())
    found["pre_tokenizer"], found["model"]["ignore_merges"], _ = CUTS[kind]
    return found


def of_characters(kind: str) -> dict[str, Any]:
    """As a converter of SentencePiece's files writes it: merges in the order of the pieces' scores."""
    words = spm_vocabulary()
    texts = [token.decode() for token in words.tokens]
    known: Mapping[str, int] = {text: i for i, text in enumerate(texts)}
    pairs = [
        (i, text[:cut], text[cut:])
        for i, text in enumerate(texts)
        if words.kinds[i] not in (BYTE, CONTROL)
        for cut in range(1, len(text))
        if text[:cut] in known and text[cut:] in known
    ]
    normalizer, pre_tokenizer, _ = MARKS[kind]
    special = [i for i, kind_of in enumerate(words.kinds) if kind_of == CONTROL or i == 0]
    return {
        "version": "1.0",
        "added_tokens": [added_token(i, texts[i]) for i in special],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": dict(known),
            "merges": [[left, right] for _, left, right in sorted(pairs, key=lambda pair: -words.scores[pair[0]])],
        },
    }
