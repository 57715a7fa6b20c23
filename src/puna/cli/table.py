"""Tables of plain text: columns padded to their widest cell, no trailing spaces, no colours."""

from __future__ import annotations

from collections.abc import Sequence

from puna.cli.terminal import text_width

_GAP = "    "


def table(rows: Sequence[Sequence[str]], *, indent: str = "") -> str:
    """Lines of text, one per row; the heading, if any, is the first row."""
    if not rows:
        return ""
    n_columns = max(map(len, rows))
    widths = [max((text_width(row[i]) for row in rows if i < len(row)), default=0) for i in range(n_columns)]
    return "".join((indent + _GAP.join(map(_padded, row, widths))).rstrip() + "\n" for row in rows)


def _padded(cell: str, width: int) -> str:
    return cell + " " * (width - text_width(cell))
