"""From the pixels of an image to what an encoder takes: resized, on a background, normalised, cut into patches.

Families differ in which of these they do and with what numbers; how each is done is the same for all. Resizing is Pillow's:
a filter that grows with what is made smaller, so that nothing is skipped, in whole numbers. The families' own processors are
made on it, and libmtmd does the same arithmetic.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from puna.vision.metadata import Colour
from puna.vision.model import Pixels

Floats = npt.NDArray[np.float32]
Size = tuple[int, int]  # width, height

_ROWS_AT_ONCE = 256


class Filter(Enum):
    BILINEAR = Image.Resampling.BILINEAR
    BICUBIC = Image.Resampling.BICUBIC
    LANCZOS = Image.Resampling.LANCZOS


def size_of(pixels: Pixels) -> Size:
    height, width, _ = pixels.shape
    return width, height


def resized(pixels: Pixels, size: Size, how: Filter) -> Pixels:
    """To this size, whatever becomes of the proportions."""
    if size_of(pixels) == size:
        return pixels
    # Rows first, then columns: in one call Pillow may turn that around, and between the two is rounded.
    rows = Image.fromarray(pixels).resize((size[0], pixels.shape[0]), how.value)
    return np.asarray(rows.resize(size, how.value))


def on_canvas(pixels: Pixels, size: Size, how: Filter, background: tuple[int, int, int]) -> Pixels:
    """As large as fits within this size with its proportions kept, in the middle of a canvas of this size."""
    (width, height), (canvas_width, canvas_height) = size_of(pixels), size
    if (width, height) == size:
        return pixels
    # In double precision, as the published processor has it: what is whole in another and not quite in this differs by a row.
    scale = min(canvas_width / width, canvas_height / height)
    inner = min(math.ceil(width * scale), canvas_width), min(math.ceil(height * scale), canvas_height)
    canvas: Pixels = np.empty((canvas_height, canvas_width, 3), np.uint8)
    canvas[:] = background
    left, top = (canvas_width - inner[0]) // 2, (canvas_height - inner[1]) // 2
    canvas[top : top + inner[1], left : left + inner[0]] = resized(pixels, inner, how)
    return canvas


def squared(pixels: Pixels, side: int, how: Filter, background: tuple[int, int, int]) -> Pixels:
    """To this side, in the middle of a square as long as its longer side. That square is never there as a whole: of a thin
    image it would be many times as large.
    """
    width, height = size_of(pixels)
    longer = max(width, height)
    left, top = (longer - width) // 2, (longer - height) // 2
    rows: Pixels = np.empty((longer, side, 3), np.uint8)
    rows[:] = background
    for begin in range(0, height, _ROWS_AT_ONCE):
        some = pixels[begin : begin + _ROWS_AT_ONCE]
        strip: Pixels = np.empty((len(some), longer, 3), np.uint8)
        strip[:] = background
        strip[:, left : left + width] = some
        rows[top + begin :][: len(some)] = resized(strip, (side, len(some)), how)
    return resized(rows, (side, side), how)


def normalised(pixels: Pixels, mean: Colour, std: Colour) -> Floats:
    """Each channel between 0 and 1, less its mean, over its deviation."""
    scaled = pixels.astype(np.float32) / 255
    return ((scaled - np.array(mean, np.float32)) / np.array(std, np.float32)).astype(np.float32)


def patches(values: Floats, size: int, cell: int = 1) -> Floats:
    """Cut into squares, [n, 3 * size * size], with a patch's values channel by channel and row by row.

    With a *cell* of c the patches come cell by cell, c * c of them that lie together and become one row of the output, so that
    these are neighbours in memory; cells, and patches in a cell, row by row. What is left at the right and the bottom is dropped.
    """
    height, width, n_channels = values.shape
    rows, columns = height // (size * cell), width // (size * cell)
    cut = values[: rows * cell * size, : columns * cell * size]
    parts = cut.reshape(rows, cell, size, columns, cell, size, n_channels)
    return np.ascontiguousarray(parts.transpose(0, 3, 1, 4, 6, 2, 5)).reshape(-1, n_channels * size * size)


def by_cells(grid: npt.NDArray[Any], cell: int) -> npt.NDArray[Any]:
    """Something of each patch, [rows, columns, ...], in the order in which ``patches`` gives them, [n, ...]."""
    rows, columns, *rest = grid.shape
    parts = grid.reshape(rows // cell, cell, columns // cell, cell, *rest)
    return np.ascontiguousarray(parts.swapaxes(1, 2)).reshape(rows * columns, *rest)
