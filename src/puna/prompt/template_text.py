"""What the text of a template tells without being executed: which variables it uses, and what it prints around some of them.

One pass over the source in either language, in time that grows as the text does: anybody may have written it. Neither language
is parsed; what a malformed template says does not matter.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

MAX_CHARS = 1 << 18  # as long as a template may be; of a longer one only the beginning is read

_GO_STOP = re.compile(r"[\"'`]|\}\}")
_GO_COMMENT = re.compile(r"\{\{-?\s*/\*")
_JINJA_OPENING = re.compile(r"\{[{%#]")
_JINJA_STOPS = {"{{": re.compile(r"[\"']|\}\}"), "{%": re.compile(r"[\"']|%\}"), "{#": re.compile(r"#\}")}
_WORD = re.compile(r"\w+")
_FIELD = re.compile(r"\.(\w+)")
_QUOTED = {quote: re.compile(rf"(?:[^{quote}\\]|\\.)*+{quote}", re.DOTALL) for quote in "\"'"}
_PRINTS_THINKING = re.compile(r"(?:\$?\w*)\.Thinking")


@dataclass(frozen=True)
class Segment:
    """Text between actions, or what stands in one action, without its strings."""

    text: str
    is_action: bool = False


@functools.lru_cache(maxsize=64)
def go_segments(source: str) -> tuple[Segment, ...]:
    """Texts and actions of a Go template; comments are neither, and what follows an action without an end is lost."""
    return tuple(_go_segments(source[:MAX_CHARS]))


def _go_segments(source: str) -> Iterator[Segment]:
    position = 0
    while (begin := source.find("{{", position)) >= 0:
        if begin > position:
            yield Segment(source[position:begin])
        comment_begin = _GO_COMMENT.match(source, begin)
        if comment_begin:
            comment = source.find("*/", comment_begin.end())
            position = -1 if comment < 0 else source.find("}}", comment)
            if position < 0:
                return
            position += 2
            continue
        code, position = _code(source, begin + 2, _GO_STOP, "}}")
        if position < 0:
            return
        yield Segment(code.removeprefix("-").removesuffix("-").strip(), is_action=True)
    if position < len(source):
        yield Segment(source[position:])


def _code(source: str, begin: int, stop: re.Pattern[str], end: str) -> tuple[str, int]:
    """What stands outside of strings up to *end*, and where that ends; -1 when it does not."""
    parts: list[str] = []
    position = begin
    while (match := stop.search(source, position)) is not None:
        parts.append(source[position : match.start()])
        if match.group() == end:
            return " ".join(parts), match.end()
        if match.group() == "`":
            position = source.find("`", match.end()) + 1
        else:
            closing = _QUOTED[match.group()].match(source, match.end())
            position = closing.end() if closing else 0
        if not position:
            break
    return "", -1


@functools.lru_cache(maxsize=64)
def go_fields(source: str) -> frozenset[str]:
    """Every name that stands behind a dot in an action: ``Tools``, ``Suffix``."""
    return frozenset(name for part in go_segments(source) if part.is_action for name in _FIELD.findall(part.text))


@functools.lru_cache(maxsize=64)
def jinja_words(source: str) -> frozenset[str]:
    """Every word of statements and expressions that stands in no string."""
    source = source[:MAX_CHARS]
    found: set[str] = set()
    position = 0
    while (opening := _JINJA_OPENING.search(source, position)) is not None:
        kind = opening.group()
        end = {"{{": "}}", "{%": "%}", "{#": "#}"}[kind]
        code, position = _code(source, opening.end(), _JINJA_STOPS[kind], end)
        if position < 0:
            break
        if kind != "{#":
            found.update(_WORD.findall(code))
    return frozenset(found)


def around_thinking(go_template: str) -> tuple[str, str] | None:
    """The texts directly before and after the first place where a Go template prints a message's thinking."""
    segments = go_segments(go_template)
    for before, action, after in zip(segments, segments[1:], segments[2:], strict=False):
        is_print = action.is_action and _PRINTS_THINKING.fullmatch(action.text)
        texts = [part.text.strip() for part in (before, after) if not part.is_action]
        if is_print and len(texts) == 2 and all(texts):
            return texts[0], texts[1]
    return None


def before_calls(go_template: str) -> str:
    """What a Go template prints between the condition that there are tool calls and the first of them, or its brace."""
    found: list[str] | None = None
    for part in go_segments(go_template):
        if found is None:
            if part.is_action and part.text.startswith(("if ", "else if ")) and "ToolCalls" in _FIELD.findall(part.text):
                found = []
        elif part.is_action:
            if part.text.split(maxsplit=1)[:1] == ["range"]:
                return "".join(found)
        else:
            text, brace, _ = part.text.partition("{")
            found.append(text)
            if brace:
                return "".join(found)
    return ""
