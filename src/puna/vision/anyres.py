"""Images of more pixels than an encoder takes, as LLaVA 1.6 has them (Liu et al. 2024).

All of one is made small, and beside that it is put on a canvas of tiles as far as its proportions allow. The patches of the
tiles stand row by row of the whole canvas, without those of its margins.
"""

from __future__ import annotations

from collections.abc import Sequence

Size = tuple[int, int]  # width, height
Rows = Sequence[int]


def best_canvas(width: int, height: int, canvases: Sequence[Size]) -> Size:
    """On which most of the image's pixels are left; of several the smallest."""

    def kept(canvas: Size) -> int:
        scale = min(canvas[0] / width, canvas[1] / height)
        return min(int(width * scale) * int(height * scale), width * height)

    return max(canvases, key=lambda canvas: (kept(canvas), kept(canvas) - canvas[0] * canvas[1]))


def without_margins(width: int, height: int, columns: int, rows: int) -> tuple[range, range]:
    """Of a grid of patches in whose middle an image stands with its proportions: the columns and the rows that it covers."""
    if width / height > columns / rows:
        margin = (rows - int(round(height * (columns / width), 7))) // 2
        return range(columns), range(margin, rows - margin)
    margin = (columns - int(round(width * (rows / height), 7))) // 2
    return range(margin, columns - margin), range(rows)


def across_tiles(columns: range, rows: range, side: int, tiles_across: int, per_tile: int) -> list[list[int]]:
    """The numbers of encoded rows for each row of the grid, where tiles have side x side patches and *per_tile* rows each."""
    return [[(y // side * tiles_across + x // side) * per_tile + y % side * side + x % side for x in columns] for y in rows]
