"""How text is cut before it is merged into tokens, from a tokenizer.json to llama.cpp's word for it.

A way of cutting that has no such word is refused, because the wrong one gives other tokens without any error. It is known
by what it does, not by whose it is: many models share one.
"""

from __future__ import annotations

from typing import Any

import msgspec

from puna.errors import UnsupportedModel

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(ending: str) -> str:
    """Words of small letters behind capital ones, or of capital ones."""
    begin = r"[^\r\n\p{L}\p{N}]?"
    return f"{begin}{_UPPER}*{_LOWER}+{ending}|{begin}{_UPPER}+{_LOWER}*{ending}"


_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"

_PATTERNS = {  # the expressions that cut the text one after another, as tokenizer.json files have them
    (_LLAMA3,): "dbrx",
    (rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",): "qwen2",
    (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
    ): "qwen35",
    (_cased("") + rf"|\p{{N}}|{_SIGNS}|{_SPACES}",): "tekken",
    (_cased(f"{_CONTRACTIONS}?") + rf"|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}",): "gpt-4o",
    (
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
        rf"|{_SPACES}",
    ): "deepseek-v3",
}
_WHOLE_WORDS_FIRST = {"dbrx": "llama-bpe"}  # the same, but a word that is a token stays one, however it would merge

# Other ways to write the same: the contractions, and repetitions that give nothing back, where nothing could be given.
_SPELLINGS = {"'(?i:[sdmt]|ll|ve|re)": _CONTRACTIONS, "?+": "?", "++": "+", r"\s*[\r\n]|\s+(?!\S)": r"\s*[\r\n]+|\s+(?!\S)"}


def cut_by(pre_tokenizer: Any, ignores_merges: bool) -> str:
    """Llama.cpp's name of how the text is cut; *ignores_merges* of words that are tokens.

    Errors: UnsupportedModel quoting what has no name.
    """
    steps = steps_of(pre_tokenizer, "pretokenizers")
    if steps and steps[-1].get("type") == "ByteLevel" and not steps[-1].get("add_prefix_space"):
        before = steps[:-1]
        has_default_pattern = steps[-1].get("use_regex", True)
        if not before and has_default_pattern:
            return "gpt-2"
        if len(before) == 1 and before[0].get("type") == "Digits" and before[0].get("individual_digits") and has_default_pattern:
            return "smollm"
        if before and not has_default_pattern and (name := _PATTERNS.get(tuple(map(_expression, before)))):
            return _WHOLE_WORDS_FIRST.get(name, name) if ignores_merges else name
    raise _unknown("pre_tokenizer", pre_tokenizer)


def _expression(step: dict[str, Any]) -> str:
    """What cuts the text so that nothing is lost; empty for another kind of step."""
    pattern = step.get("pattern")
    how = step.get("behavior"), bool(step.get("invert"))
    if step.get("type") != "Split" or not isinstance(pattern, dict) or how not in (("Isolated", False), ("Removed", True)):
        return ""
    found = str(pattern.get("Regex"))
    for other, ours in _SPELLINGS.items():
        found = found.replace(other, ours)
    return found


def check_normalizer(normalizer: Any) -> None:
    """Of bytes: composed characters are taken for what texts have already.

    Errors: UnsupportedModel quoting one that changes texts.
    """
    if any(step.get("type") != "NFC" for step in steps_of(normalizer, "normalizers")):
        raise _unknown("normalizer", normalizer)


_MARK = "\u2581"  # stands for a space in pieces


def spaces_of(normalizer: Any, pre_tokenizer: Any) -> bool:
    """Whether a space is put before a text whose spaces become marks; no more may be done to it.

    Errors: UnsupportedModel quoting what else is done.
    """
    begins = has_marks = False
    for step in steps_of(normalizer, "normalizers"):
        if step.get("type") == "Prepend" and step.get("prepend") == _MARK:
            begins = True
        elif step.get("type") != "Replace" or step.get("pattern") != {"String": " "} or step.get("content") != _MARK:
            raise _unknown("normalizer", normalizer)
        else:
            has_marks = True
    for step in steps_of(pre_tokenizer, "pretokenizers"):
        if step.get("type") == "Metaspace" and step.get("replacement") == _MARK and step.get("prepend_scheme") == "never":
            has_marks = True
        elif step.get("type") != "Split" or step.get("pattern") != {"String": " "}:  # there are none any more
            raise _unknown("pre_tokenizer", pre_tokenizer)
    if not has_marks:
        raise _unknown("normalizer", normalizer)
    return begins


def _unknown(what: str, value: Any) -> UnsupportedModel:
    shown = msgspec.json.encode(value).decode("utf-8", "replace")
    return UnsupportedModel(f"tokenizer.json: this {what} is not known: {shown[:500]}")


def steps_of(component: Any, name: str) -> list[dict[str, Any]]:
    """The parts of a tokenizer's component: those of a sequence, or the one it is."""
    if not isinstance(component, dict):
        return []
    if component.get("type") != "Sequence":
        return [component]
    parts = component.get(name)
    return [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
