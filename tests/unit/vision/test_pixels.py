"""How images become what encoders take, against what is published of it: the filters' formulas, and the order of values."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from puna.vision.pixels import Filter, by_cells, normalised, on_canvas, patches, resized, squared
from tests.vision.encoding import picture

# A filter's weight at a distance in pixels of the larger image, and how far it reaches.
FORMULAS: dict[Filter, tuple[Callable[[float], float], float]] = {
    Filter.BILINEAR: (lambda x: max(0.0, 1 - abs(x)), 1.0),
    Filter.BICUBIC: (lambda x: _keys(abs(x)), 2.0),
    Filter.LANCZOS: (lambda x: float(np.sinc(x) * np.sinc(x / 3)) if abs(x) < 3 else 0.0, 3.0),
}


def _keys(x: float) -> float:
    """Keys 1981 with a = -1/2."""
    if x < 1:
        return 1.5 * x**3 - 2.5 * x**2 + 1
    return -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2 if x < 2 else 0.0


def _matrix(n_in: int, n_out: int, how: Filter) -> np.ndarray:
    """Each row the shares of the pixels that a pixel of the result is made of: centres are halves, the filter is stretched
    by what the image shrinks, the shares sum to 1.
    """
    formula, reach = FORMULAS[how]
    scale = n_in / n_out
    stretch = max(scale, 1.0)
    found = np.zeros((n_out, n_in))
    for i in range(n_out):
        centre = (i + 0.5) * scale
        first, last = max(0, math.floor(centre - reach * stretch + 0.5)), min(n_in, math.floor(centre + reach * stretch + 0.5))
        for j in range(first, last):
            found[i, j] = formula((j + 0.5 - centre) / stretch)
        found[i] /= found[i].sum()
    return found


def by_the_book(pixels: np.ndarray, size: tuple[int, int], how: Filter) -> np.ndarray:
    """Along the rows, rounded to eight bits, then along the columns."""
    height, width, _ = pixels.shape
    found = pixels.astype(np.float64)
    for axis, n_in, n_out in ((1, width, size[0]), (0, height, size[1])):
        if n_in != n_out:
            summed = np.moveaxis(np.tensordot(_matrix(n_in, n_out, how), found, (1, axis)), 0, axis)
            found = np.clip(np.floor(summed + 0.5), 0, 255)
    return found


@pytest.mark.parametrize("how", Filter)
@pytest.mark.parametrize(
    ("width", "height", "size"),
    [(60, 40, (31, 17)), (31, 17, (60, 40)), (64, 64, (64, 20)), (7, 300, (28, 28)), (1, 1, (14, 14)), (256, 3, (32, 64))],
)
def test_resizing_is_the_filters_formula(width: int, height: int, size: tuple[int, int], how: Filter) -> None:
    pixels = picture(width, height)
    found = resized(pixels, size, how).astype(int)
    assert found.shape == (size[1], size[0], 3)
    apart = np.abs(found - by_the_book(pixels, size, how))
    assert apart.max() <= 1  # shares are kept with 22 bits, so that a half may fall to either side
    assert (apart > 0).mean() < 0.02


def test_an_image_of_the_right_size_is_left_alone() -> None:
    pixels = picture(20, 30)
    assert resized(pixels, (20, 30), Filter.BICUBIC) is pixels
    assert on_canvas(pixels, (20, 30), Filter.BICUBIC, (1, 2, 3)) is pixels


@pytest.mark.parametrize(
    ("width", "height", "box"),
    # Left, top, width and height of what is no background on a canvas of 48 x 48.
    [
        (100, 50, (0, 12, 48, 24)),
        (50, 100, (12, 0, 24, 48)),
        (97, 10, (0, 21, 48, 5)),
        (3, 3, (0, 0, 48, 48)),
        (1, 200, (23, 0, 1, 48)),
    ],
)
def test_on_a_canvas_proportions_are_kept(width: int, height: int, box: tuple[int, int, int, int]) -> None:
    pixels = np.full((height, width, 3), 200, np.uint8)
    found = on_canvas(pixels, (48, 48), Filter.BICUBIC, (122, 116, 104))
    expected = np.broadcast_to(np.array([122, 116, 104], np.uint8), (48, 48, 3)).copy()
    left, top, inner_width, inner_height = box
    expected[top : top + inner_height, left : left + inner_width] = 200
    assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    ("width", "height", "left", "top"),
    [(7, 4, 0, 1), (4, 7, 1, 0), (1, 6, 2, 0), (5, 5, 0, 0), (900, 700, 0, 100), (350, 600, 125, 0)],
)
@pytest.mark.parametrize("side", [5, 48])
def test_a_square_has_the_image_in_its_middle(width: int, height: int, left: int, top: int, side: int) -> None:
    pixels = picture(width, height)
    square = np.empty((max(width, height), max(width, height), 3), np.uint8)
    square[:] = (1, 2, 3)
    square[top : top + height, left : left + width] = pixels
    assert np.array_equal(squared(pixels, side, Filter.BICUBIC, (1, 2, 3)), resized(square, (side, side), Filter.BICUBIC))


@pytest.mark.parametrize(("width", "height"), [(2, 6000), (6000, 2)])
def test_a_square_takes_no_more_memory_than_it_must(width: int, height: int) -> None:
    pixels = np.full((height, width, 3), 7, np.uint8)
    tracemalloc.start()
    squared(pixels, 48, Filter.BICUBIC, (1, 2, 3))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 3 * max(width, height) ** 2 / 4


def test_a_canvas_is_as_the_published_processor_rounds() -> None:
    """3000 * (672 / 4000) is a little more than 504."""
    found = on_canvas(np.full((4000, 3000, 3), 200, np.uint8), (672, 672), Filter.BICUBIC, (0, 0, 0))
    assert (found[300] == 200).all(1).nonzero()[0].tolist() == list(range(83, 588))


def test_normalising_is_by_channel() -> None:
    pixels = np.array([[[0, 255, 51]]], np.uint8)
    found = normalised(pixels, (0.5, 0.25, 0.1), (0.5, 0.25, 0.2))
    assert found.dtype == np.float32
    assert found[0, 0] == pytest.approx([-1.0, 3.0, 0.5])


def test_a_patch_is_channel_by_channel_and_row_by_row() -> None:
    values = np.arange(4 * 6 * 3, dtype=np.float32).reshape(4, 6, 3)
    found = patches(values, 2)
    assert found.shape == (6, 12)
    assert np.array_equal(found[0], [values[y, x, c] for c in range(3) for y in range(2) for x in range(2)])
    assert np.array_equal(found[4], [values[2 + y, 2 + x, c] for c in range(3) for y in range(2) for x in range(2)])


def test_patches_of_a_cell_are_neighbours() -> None:
    rows, columns, size, cell = 4, 6, 3, 2
    grid = np.arange(rows * columns).reshape(rows, columns)
    values = np.repeat(np.repeat(grid, size, 0), size, 1)[..., None].repeat(3, -1).astype(np.float32)
    order = [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11, 12, 13, 18, 19, 14, 15, 20, 21, 16, 17, 22, 23]
    assert patches(values, size, cell)[:, 0].tolist() == order
    assert by_cells(grid, cell).tolist() == order


def test_what_is_no_whole_patch_is_dropped() -> None:
    values = np.arange(7 * 5 * 3, dtype=np.float32).reshape(7, 5, 3)
    assert np.array_equal(patches(values, 2), patches(values[:6, :4], 2))
    assert np.array_equal(patches(values, 2, cell=2), patches(values[:4, :4], 2, cell=2))
