"""The parts of a model's output: text, thinking and tool calls.

Knows no format; each format has a parser of its own. Whatever a model writes is one of the three, never an error.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol

_ID_CHARACTERS = string.ascii_lowercase + string.digits


def new_call_id() -> str:
    return "call_" + "".join(secrets.choice(_ID_CHARACTERS) for _ in range(8))


@dataclass(frozen=True)
class Thinking:
    """A piece of thinking, among pieces of text."""

    text: str


@dataclass(frozen=True)
class Call:
    """One complete call of a tool that the request named."""

    name: str
    arguments: dict[str, Any]
    id: str = field(default_factory=new_call_id, compare=False)


Part = str | Thinking | Call


class Parser(Protocol):
    """Reads one output as it streams by. The parts do not depend on how the text was cut into pieces."""

    def feed(self, text: str) -> list[Part]:
        """What is certain after *text* has come; what may still become something else is held back."""
        ...

    def finish(self) -> list[Part]:
        """What was held back, now that no more comes."""
        ...


def overlap(text: str, tag: str) -> int:
    """Characters at the end of *text* that may be the beginning of *tag*."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:n])), 0)


def joined(parts: Iterable[Part]) -> list[Part]:
    """Neighbouring texts and neighbouring pieces of thinking become one; empty ones go."""
    found: list[Part] = []
    for kind, group in groupby(filter(_is_something, parts), type):
        if kind is str:
            found.append("".join(map(str, group)))
        elif kind is Thinking:
            found.append(Thinking("".join(part.text for part in group if isinstance(part, Thinking))))
        else:
            found += group
    return found


def _is_something(part: Part) -> bool:
    return part not in ("", Thinking(""))
