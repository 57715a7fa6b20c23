"""Python's literals and calls of functions with them, read without Python's compiler, which is not made for hostile text.

Source: the Python language reference, "Lexical analysis" and "Expressions", as far as models use them in tool calls.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

MAX_DEPTH = 64
_CONSTANTS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_STRING = re.compile(r"\"\"\"(.*?)\"\"\"|'''(.*?)'''|\"((?:[^\"\\]|\\.)*)\"|'((?:[^'\\]|\\.)*)'", re.DOTALL)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4}|[0-7]{1,3}|\n|.)", re.DOTALL)
_SHORT = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\n": "", "\\": "\\", "'": "'", '"': '"'}
_BRACKETS = {"[": "]", "(": ")"}


@dataclass(frozen=True)
class PythonCall:
    name: str
    positional: list[Any] = field(default_factory=list)
    named: dict[str, Any] = field(default_factory=dict)


def read_value(text: str) -> Any:
    """The literal that *text* is.

    Errors: ValueError for anything else.
    """
    reader = _Reader(text)
    value = reader.value(0)
    reader.end()
    return value


def read_calls(text: str) -> list[PythonCall]:
    """``f(a=1)``, several of such on lines of their own, or a list of them.

    Errors: ValueError for anything else.
    """
    reader = _Reader(text)
    if reader.takes("["):
        calls: list[PythonCall] = reader.items("]", lambda: reader.call(1))
        reader.end()
        return calls
    calls = [reader.call(0)]
    while reader.begins_line():
        calls.append(reader.call(0))
    reader.end()
    return calls


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._ended_with_comma = False  # the latest list of items

    def takes(self, mark: str) -> bool:
        self._skip_space()
        if not self._text.startswith(mark, self._at):
            return False
        self._at += len(mark)
        return True

    def begins_line(self) -> bool:
        """Whether there is more, on another line than what was read."""
        before = self._at
        self._skip_space()
        return self._at < len(self._text) and "\n" in self._text[before : self._at]

    def end(self) -> None:
        self._skip_space()
        if self._at < len(self._text):
            raise self._error()

    def items(self, closing: str, read: Any) -> list[Any]:
        """What stands between commas, up to *closing*."""
        found: list[Any] = []
        ended_with_comma = False
        while not self.takes(closing):
            found.append(read())
            ended_with_comma = self.takes(",")
            if not ended_with_comma:
                self._expect(closing)
                break
        self._ended_with_comma = ended_with_comma
        return found

    def call(self, depth: int) -> PythonCall:
        name = self._match(_NAME).group()
        self._expect("(")
        positional: list[Any] = []
        named: dict[str, Any] = {}

        def argument() -> None:
            before = self._at
            self._skip_space()
            key = _NAME.match(self._text, self._at)
            if key is not None:
                self._at = key.end()
                if self.takes("="):
                    named[key.group()] = self.value(depth + 1)
                    return
            self._at = before
            positional.append(self.value(depth + 1))

        self.items(")", argument)
        return PythonCall(name, positional, named)

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError("too deep")
        self._skip_space()
        first = self._text[self._at : self._at + 1]
        if first in ("'", '"') and first:
            return self._string()
        if first in _BRACKETS:
            self._at += 1
            found = self.items(_BRACKETS[first], lambda: self.value(depth + 1))
            is_group = first == "(" and len(found) == 1 and not self._ended_with_comma
            return found[0] if is_group else found
        if first == "{":
            self._at += 1
            return dict(self.items("}", lambda: self._pair(depth + 1)))
        name = _NAME.match(self._text, self._at)
        if name is not None and name.group() in _CONSTANTS:
            self._at = name.end()
            return _CONSTANTS[name.group()]
        return self._number()

    def _pair(self, depth: int) -> tuple[str, Any]:
        key = self.value(depth)
        self._expect(":")
        return str(key), self.value(depth)

    def _string(self) -> str:
        match = self._match(_STRING)
        body = next(group for group in match.groups() if group is not None)
        return _ESCAPE.sub(_unescaped, body)

    def _number(self) -> int | float:
        text = self._match(_NUMBER).group().replace("_", "")
        return int(text) if re.fullmatch(r"[+-]?\d{1,300}", text) else float(text)

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str]:
        self._skip_space()
        match = pattern.match(self._text, self._at)
        if match is None:
            raise self._error()
        self._at = match.end()
        return match

    def _expect(self, mark: str) -> None:
        if not self.takes(mark):
            raise self._error()

    def _skip_space(self) -> None:
        match = _SPACE.match(self._text, self._at)
        assert match is not None
        self._at = match.end()

    def _error(self) -> ValueError:
        return ValueError(f"no literal at character {self._at}")


def _unescaped(match: re.Match[str]) -> str:
    code: str = match.group(1)
    if code[0] in "01234567":
        return chr(int(code, 8))
    if len(code) > 1:
        return chr(int(code[1:], 16))
    return _SHORT.get(code, "\\" + code)
