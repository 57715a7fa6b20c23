"""Images that a person names in what is entered: paths are taken out of the text, and the files sent along.

A path is absolute, or begins with ``./``, ``../`` or ``~/``, and ends like an image's. It may be quoted, or have spaces with or
without backslashes, as terminals paste it. What names no file stays text.
"""

from __future__ import annotations

import base64
import re
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from puna.errors import BadRequest, NotFound

if TYPE_CHECKING:
    from puna.api.client import Client

MAX_BYTES = 100 << 20
_MAX_STARTS, _MAX_ENDS = 64, 16  # places of a text that are tried for a path's beginning, and for each its end

_START = re.compile(r"(?:^|(?<=[\s\"'(]))(?:[A-Za-z]:[\\/]|\.{1,2}/|~/|/)")
_END = re.compile(r"\.(?:jpe?g|png|webp|bmp|tiff?|gif)\b", re.IGNORECASE)
_ESCAPED = re.compile(r"\\([\s\\'\"()\[\]{}$&;|*?!~`<>#%=@])")
_FORMATS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF", b"BM", b"II*\0", b"MM\0*", b"GIF8")


class Entered(NamedTuple):
    text: str
    images: list[str]  # their files, as the API takes them


class _Found(NamedTuple):
    begin: int  # of the text that names it, with quotes
    end: int
    path: Path


def entered_for(client: Client, model: str, text: str, projector: str = "") -> Entered:
    """What was entered, with the images that it names if the model sees; to one that only reads they are text."""
    if not has_path(text) or not (projector or "vision" in (client.show(model).get("capabilities") or ())):
        return Entered(text, [])
    return taken_out(text)


def has_path(text: str) -> bool:
    """Whether the text may name an image: to be asked before anything that takes time."""
    return bool(_START.search(text)) and bool(_END.search(text))


def begins_with_path(text: str) -> bool:
    """Whether the text begins with an image that is there, as when one is dropped on a terminal."""
    return has_path(text) and next((found.begin == 0 for found in _paths(text)), False)


def taken_out(text: str) -> Entered:
    """The text without the images that it names, each of which is told.

    Errors: BadRequest for a file that is too large or no image; NotFound when it cannot be read.
    """
    images: list[str] = []
    rest = ""
    at = 0
    for found in _paths(text):
        images.append(_read(found.path))
        print(f"Added image '{found.path}'", file=sys.stderr, flush=True)
        rest += text[at : found.begin]
        at = found.end
    return Entered((rest + text[at:]).strip() if images else text, images)


def _paths(text: str) -> Iterator[_Found]:
    """From left to right: at each place the shortest that names a file."""
    at = 0
    for start in islice(_START.finditer(text), _MAX_STARTS):
        if start.start() < at:
            continue
        for end in islice(_END.finditer(text, start.end() - 1), _MAX_ENDS):
            path = _file(text[start.start() : end.end()])
            if path is None:
                continue
            begin, at = start.start(), end.end()
            quote = text[begin - 1 : begin]
            if quote and quote in "\"'" and text[at : at + 1] == quote:
                begin, at = begin - 1, at + 1
            yield _Found(begin, at, path)
            break


def _file(text: str) -> Path | None:
    for written in (text, _ESCAPED.sub(r"\1", text)):
        path = Path(written).expanduser()
        try:
            if "\n" not in written and path.is_file():
                return path
        except (OSError, ValueError):  # longer than any path, or no path at all
            continue
    return None


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise BadRequest(f"image '{path}' is larger than {MAX_BYTES >> 20} MB")
        data = path.read_bytes()
    except OSError as error:
        raise NotFound(f"image '{path}': {error.strerror}") from error
    if not data.startswith(_FORMATS):
        raise BadRequest(f"image '{path}' is none, whatever its name says")
    return base64.b64encode(data).decode()
