"""Modelfiles: parse the text into instructions, and write instructions as text.

Knows the grammar only; whether FROM names a file or a model is decided by whoever has a folder to look into.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from puna.api.options import DEPRECATED
from puna.errors import BadRequest, FileFormatError
from puna.store.models import parameters

INSTRUCTIONS = (
    *("from", "license", "template", "system", "adapter", "draft", "renderer", "parser", "parameter", "message", "requires"),
)
ROLES = ("system", "user", "assistant")
MAX_CHARACTERS = 16 << 20

_LINE_END = re.compile(r"\r\n|\r|\n")
SEMVER = re.compile(r"v?(0|[1-9]\d*)(\.(0|[1-9]\d*)){0,2}([-+][0-9A-Za-z.+-]+)?")
_FIRST_WORD = re.compile(r"[ \t]*([^ \t]*)[ \t]*")


@dataclass(frozen=True)
class Instruction:
    """One statement; *name* is a parameter's name or a message's role, else empty."""

    keyword: str
    value: str
    name: str = ""
    line: int = 0

    def __str__(self) -> str:
        head = self.keyword.upper() + (f" {self.name}" if self.name else "")
        return f"{head} {quote(self.value)}"

    def survives(self) -> tuple[bool, bool]:
        """Whether it is read back as one instruction, and as this very one.

        Some values have no form, and characters that no screen shows are dropped.
        """
        try:
            found = list(_instructions(_Lines(f"{self}\n")))
        except FileFormatError:
            return False, False
        is_one = len(found) == 1 and found[0].keyword == self.keyword
        return is_one, is_one and (found[0].name, found[0].value) == (self.name, self.value)


@dataclass(frozen=True)
class Modelfile:
    """Instructions in the order of the file."""

    instructions: tuple[Instruction, ...]

    def __str__(self) -> str:
        return "".join(f"{instruction}\n" for instruction in self.instructions)

    def values(self, keyword: str) -> list[str]:
        """Values of all instructions of one kind."""
        return [item.value for item in self.instructions if item.keyword == keyword]

    def last(self, keyword: str) -> str:
        """The value that counts where an instruction replaces those before it; empty when there is none."""
        return next(reversed(self.values(keyword)), "")

    @property
    def parameters(self) -> dict[str, Any]:
        """All parameters with their types; deprecated ones are left out."""
        found: dict[str, Any] = {}
        for item in self.instructions:
            if item.keyword != "parameter" or item.name in DEPRECATED:
                continue
            value = parameters.parse(item.name, item.value)
            if item.name in parameters.LISTS:
                found.setdefault(item.name, []).append(value)
            else:
                found[item.name] = value
        return found

    @property
    def deprecated(self) -> list[str]:
        """Names of parameters that are accepted without effect."""
        return [i.name for i in self.instructions if i.keyword == "parameter" and i.name in DEPRECATED]

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": i.name, "content": i.value} for i in self.instructions if i.keyword == "message"]

    @property
    def requires(self) -> str:
        return self.last("requires").removeprefix("v")


def decode(content: bytes) -> str:
    """A Modelfile's text: UTF-8, or UTF-16 with a byte order mark.

    Errors: FileFormatError.
    """
    if len(content) > MAX_CHARACTERS:
        raise FileFormatError(f"Modelfile: larger than {MAX_CHARACTERS} bytes")
    is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        return content.decode("utf-16" if is_utf16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileFormatError(f"Modelfile: not UTF-8 text (byte {error.start})") from error


def parse(text: str) -> Modelfile:
    """Read a Modelfile.

    Errors: FileFormatError, naming the line where there is one.
    """
    found = tuple(_instructions(_Lines(text.removeprefix("\ufeff"))))
    if not any(item.keyword == "from" for item in found):
        raise FileFormatError("no FROM line")
    return Modelfile(found)


def quote(value: str) -> str:
    """A value as it must stand in a Modelfile to be read back unchanged.

    One kind of value has no such form: with a line that ends in three quotes. It is written as well as can be.
    """
    needs_quotes = not value or value != value.strip() or value.startswith('"') or _LINE_END.search(value)
    if not needs_quotes:
        return value
    return f'"""{value}"""' if '"' in value else f'"{value}"'


class _Lines:
    """The text line by line, each with its line end; numbers count from 1."""

    def __init__(self, text: str) -> None:
        ends = [match.end() for match in _LINE_END.finditer(text)]
        starts = [0, *ends]
        self._lines = [_printable(text[begin:end]) for begin, end in zip(starts, [*ends, len(text)], strict=True)]
        self.number = 0

    def next(self) -> str | None:
        if self.number == len(self._lines):
            return None
        self.number += 1
        return self._lines[self.number - 1]


def _printable(line: str) -> str:
    if line.isprintable():
        return line
    return "".join(character for character in line if character.isprintable() or character in "\t\r\n")


def _instructions(lines: _Lines) -> Iterator[Instruction]:
    while (line := lines.next()) is not None:
        line = line.lstrip(" \t")
        if not line.strip() or line.startswith("#"):
            continue
        begin = lines.number
        match = re.match(r"[A-Za-z]+", line)
        keyword = match.group().lower() if match else ""
        rest = line[len(keyword) :]
        if keyword not in INSTRUCTIONS or not rest[:1].isspace():
            if keyword in INSTRUCTIONS and not rest:
                raise FileFormatError("unexpected EOF")
            allowed = ", ".join(f'"{name}"' for name in INSTRUCTIONS[:-1])
            raise FileFormatError(f'(line {begin}): command must be one of {allowed}, or "{INSTRUCTIONS[-1]}"')
        yield _instruction(keyword, rest, lines, begin)


def _instruction(keyword: str, rest: str, lines: _Lines, begin: int) -> Instruction:
    name = ""
    if keyword in ("parameter", "message"):
        match = _FIRST_WORD.match(rest)
        name = match.group(1).strip() if match else ""
        rest = rest[match.end() :] if match else ""
        _check_name(keyword, name, begin)
    value = _value(rest, lines, begin)
    if keyword == "parameter" and name not in DEPRECATED:
        try:
            parameters.parse(name, value)
        except BadRequest as error:
            raise FileFormatError(f"(line {begin}): {error}") from error
    if keyword == "requires" and not SEMVER.fullmatch(value):
        raise FileFormatError(f"(line {begin}): requires must be a valid semver (e.g. 0.14.0)")
    return Instruction(keyword, value, name, begin)


def _check_name(keyword: str, name: str, line: int) -> None:
    if not name:
        raise FileFormatError(f"(line {line}): unexpected EOF: {keyword.upper()} needs a name and a value")
    if keyword == "message" and name not in ROLES:
        raise FileFormatError(f'(line {line}): message role must be one of "system", "user", or "assistant"')


def _value(first: str, lines: _Lines, begin: int) -> str:
    """The rest of the line, or all up to the line whose end closes the quote."""
    if not first.strip():
        raise FileFormatError(f"(line {begin}): unexpected EOF: the value is missing")
    mark = next((mark for mark in ('"""', '"') if first.lstrip().startswith(mark)), "")
    parts = [first]
    while True:
        if parts[-1].rstrip().endswith(mark):
            text = "".join(parts).strip()
            if len(text) >= 2 * len(mark):
                return text.removeprefix(mark).removesuffix(mark)
        line = lines.next()
        if line is None:
            raise FileFormatError(f"(line {begin}): unexpected EOF: the quote that begins here is never closed")
        parts.append(line)


def from_parts(
    *,
    base: Iterable[str],
    adapters: Iterable[str] = (),
    draft: str = "",
    template: str = "",
    system: str = "",
    renderer: str = "",
    parser: str = "",
    options: dict[str, Any] | None = None,
    licenses: Iterable[str] = (),
    messages: Iterable[dict[str, str]] = (),
    requires: str = "",
) -> Modelfile:
    """The Modelfile that describes a model."""
    found = [Instruction("from", value) for value in base]
    found.extend(Instruction("adapter", value) for value in adapters)
    singles = {
        "draft": draft,
        "template": template,
        "system": system,
        "renderer": renderer,
        "parser": parser,
        "requires": requires,
    }
    found.extend(Instruction(keyword, value) for keyword, value in singles.items() if value)
    for name, value in parameters.lines(options or {}):
        found.append(Instruction("parameter", value if isinstance(value, str) else parameters.number_text(value), name))
    found.extend(Instruction("license", value) for value in licenses)
    found.extend(Instruction("message", message["content"], message["role"]) for message in messages)
    return Modelfile(tuple(found))
