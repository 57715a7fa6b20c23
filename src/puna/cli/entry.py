'''What a person enters at the prompt: one line, or several between ``"""``.'''

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from puna.cli.image_paths import begins_with_path

QUOTES = '"""'
_SET_SYSTEM = "/set system "


@dataclass(frozen=True)
class Entry:
    text: str
    is_command: bool


def read_entry(read_line: Callable[[bool], str]) -> Entry:
    """Read until an entry is complete; ``read_line(True)`` asks for a further line of the same entry."""
    line = read_line(False)
    head = _SET_SYSTEM if line.startswith(_SET_SYSTEM) else ""
    body = line[len(head) :].lstrip() if head else line
    if not body.startswith(QUOTES):
        return Entry(line.strip(), line.startswith("/") and not begins_with_path(line))
    text = body[len(QUOTES) :]
    while not text.rstrip().endswith(QUOTES):
        text += "\n" + read_line(True)
    text = text.rstrip()[: -len(QUOTES)]
    return Entry(head + text.strip("\n"), bool(head))
