"""Grids of square tiles that an image may fill, whatever that does to its proportions."""

from __future__ import annotations

import math

Size = tuple[int, int]  # columns, rows


def nearest_grid(width: int, height: int, tile: int, least: int, most: int) -> Size:
    """Of so many tiles the grid whose proportions are nearest to the image's; of several as near a larger one where the image has
    more than half of its pixels.
    """
    sides = range(1, most + 1)
    grids = [(columns, rows) for columns in sides for rows in sides if least <= columns * rows <= most]
    best, nearest = (1, 1), math.inf
    for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        distance = abs(width / height - columns / rows)
        is_as_near = distance == nearest and width * height > 0.5 * tile**2 * columns * rows
        if distance < nearest or is_as_near:
            best, nearest = (columns, rows), distance
    return best
