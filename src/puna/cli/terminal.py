"""What is needed to write to a terminal safely: whether there is one, its width, widths of characters, harmless text.

Models, registries and licences are not trusted with escape sequences: text on its way to a terminal goes through
``printable``. Text on its way into a pipe or file is left as it is.
"""

from __future__ import annotations

import os
import shutil
import sys
from typing import TextIO

_DEFAULT_COLUMNS = 80
_FIRST_WIDE = 0x300  # below it every printable character takes one column
_DELETE = dict.fromkeys([*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0)])  # C0 and C1 but tab and newline


def is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and not stream.closed and stream.isatty()


def on_terminal() -> bool:
    """Whether a person types what is read, and sees what is written."""
    return is_terminal(sys.stdin) and is_terminal(sys.stdout)


def can_draw(stream: TextIO | None) -> bool:
    """Whether a terminal understands escape sequences; TERM says of some that they do not."""
    return is_terminal(stream) and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def wants_colour() -> bool:
    """Not with NO_COLOR, which says so to all programs."""
    return not os.environ.get("NO_COLOR")


def columns() -> int:
    return shutil.get_terminal_size((_DEFAULT_COLUMNS, 24)).columns


def printable(text: str) -> str:
    """*text* without the control characters that move cursors, set titles or recolour what follows."""
    return text.translate(_DELETE)


def char_width(char: str) -> int:
    """Columns that one character takes: 0 for combining marks, 2 for most of East Asia's and emoji, else 1."""
    if ord(char) < _FIRST_WIDE:
        return 1
    from rich.cells import cell_len  # its tables take a while to import, and most text never gets here

    return cell_len(char)


def text_width(text: str) -> int:
    return len(text) if text.isascii() else sum(map(char_width, text))


def accept_all_text() -> None:
    """Let standard output and error take any text: what their encoding lacks becomes a question mark, not an exception.

    One that whoever started this has closed takes it, too, and keeps nothing.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for as long as this process lasts
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def safe(text: str, stream: TextIO) -> str:
    return printable(text) if is_terminal(stream) else text
