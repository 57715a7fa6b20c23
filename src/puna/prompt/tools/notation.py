"""Calls in the notation of the Gemma family: ``call:name{key:<escape>text<escape>,n:1,list:[...],object:{...}}``.

Gemma 4 writes the quotes ``<|"|>``. Keys stand bare or quoted; what is neither quoted nor in brackets is a number, a constant
or, when it is none of them, a text.
"""

from __future__ import annotations

import re
from typing import Any

from puna.prompt.tools.python_values import MAX_DEPTH
from puna.prompt.tools.values import clean, first_json

_BEGIN = re.compile(r"\s*call:([\w.:/-]+)\{")
_QUOTES = ('<|"|>', "<escape>", '"')
_BARE_END = re.compile(r"[,}\]]")
_KEY_END = re.compile(r"[:,{}\[\]]")


def read_notation(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Names and arguments of the calls that fill *text*.

    Errors: ValueError for anything else.
    """
    found: list[tuple[str, dict[str, Any]]] = []
    position = 0
    while (match := _BEGIN.match(text, position)) is not None:
        reader = _Reader(text, match.end())
        found.append((match.group(1), reader.object(0)))
        position = reader.at
    if text[position:].strip():
        raise ValueError(f"no call at character {position}")
    return found


class _Reader:
    def __init__(self, text: str, at: int) -> None:
        self._text = text
        self.at = at

    def object(self, depth: int) -> dict[str, Any]:
        """Behind the opening brace."""
        found: dict[str, Any] = {}
        while not self._takes("}"):
            key = self._key()
            self._expect(":")
            found[key] = self._value(depth + 1)
            if not self._takes(","):
                self._expect("}")
                break
        return found

    def _list(self, depth: int) -> list[Any]:
        found: list[Any] = []
        while not self._takes("]"):
            found.append(self._value(depth + 1))
            if not self._takes(","):
                self._expect("]")
                break
        return found

    def _value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError("too deep")
        quoted = self._quoted()
        if quoted is not None:
            return clean(quoted)
        if self._takes("{"):
            return self.object(depth)
        if self._takes("["):
            return self._list(depth)
        return _constant(self._up_to(_BARE_END))

    def _key(self) -> str:
        quoted = self._quoted()
        return (self._up_to(_KEY_END).strip() if quoted is None else quoted) or self._fail()

    def _quoted(self) -> str | None:
        for quote in _QUOTES:
            if self._takes(quote):
                end = self._text.find(quote, self.at)
                if end < 0:
                    self._fail()
                begin, self.at = self.at, end + len(quote)
                return self._text[begin:end]
        return None

    def _up_to(self, pattern: re.Pattern[str]) -> str:
        match = pattern.search(self._text, self.at)
        if match is None:
            raise ValueError(f"no value at character {self.at}")
        begin, self.at = self.at, match.start()
        return self._text[begin : self.at]

    def _takes(self, mark: str) -> bool:
        while self._text[self.at : self.at + 1].isspace():
            self.at += 1
        if not self._text.startswith(mark, self.at):
            return False
        self.at += len(mark)
        return True

    def _expect(self, mark: str) -> None:
        if not self._takes(mark):
            self._fail()

    def _fail(self) -> Any:
        raise ValueError(f"no value at character {self.at}")


def _constant(text: str) -> Any:
    body = text.strip()
    try:
        value, end = first_json(body)
    except ValueError:
        return clean(body)
    return value if end == len(body) else clean(body)
