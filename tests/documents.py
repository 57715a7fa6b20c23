"""The documents, and what stands in their fenced blocks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted(
    str(path.relative_to(ROOT))
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / ".github").rglob("*.md")]
)

_BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<why>[^\n]*) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)

RUN = ("sh", "python")


class Block(NamedTuple):
    document: str
    line: int
    language: str
    text: str
    not_run: str  # why; empty for those that are run


def blocks(document: str) -> list[Block]:
    text = (ROOT / document).read_text()
    return [
        Block(document, text.count("\n", 0, found.start()) + 1, found["language"], found["text"], found["why"] or "")
        for found in _BLOCK.finditer(text)
    ]


def commands() -> list[Block]:
    """All that a reader may copy into a shell or a Python file."""
    return [block for document in DOCUMENTS for block in blocks(document) if block.language in RUN]
