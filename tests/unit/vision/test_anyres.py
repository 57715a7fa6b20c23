"""Which canvas an image is put on, what of it the image covers, and in which order its patches stand."""

from __future__ import annotations

import pytest

from puna.vision.anyres import across_tiles, best_canvas, without_margins

CANVASES = [(336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)]  # of LLaVA 1.6


@pytest.mark.parametrize(
    ("width", "height", "canvas"),
    [
        (1000, 1000, (672, 672)),
        (2560, 1440, (672, 672)),  # 672 x 378, more than 597 x 336 and than that on 1008 x 336
        (1600, 500, (1008, 336)),
        (500, 1600, (336, 1008)),
        (300, 300, (336, 672)),  # all of it is left on each: the smallest, of two as small the first
        (600, 300, (672, 336)),
    ],
)
def test_the_canvas_on_which_most_is_left(width: int, height: int, canvas: tuple[int, int]) -> None:
    assert best_canvas(width, height, CANVASES) == canvas


@pytest.mark.parametrize(
    ("width", "height", "grid", "columns", "rows"),
    [
        (672, 672, (48, 48), range(48), range(48)),
        (2560, 1440, (48, 48), range(48), range(10, 38)),  # 27 of 48 rows: 10 above and below
        (1440, 2560, (48, 48), range(10, 38), range(48)),
        (1600, 500, (72, 24), range(72), range(1, 23)),
        (3, 4000, (24, 72), range(12, 12), range(72)),
    ],
)
def test_margins_are_left_out(width: int, height: int, grid: tuple[int, int], columns: range, rows: range) -> None:
    assert without_margins(width, height, *grid) == (columns, rows)


def test_rows_of_the_canvas_go_through_several_tiles() -> None:
    """Two by two tiles of 2 x 2 patches and a row more each."""
    found = across_tiles(range(4), range(4), 2, 2, 5)
    assert found == [[0, 1, 5, 6], [2, 3, 7, 8], [10, 11, 15, 16], [12, 13, 17, 18]]
    assert across_tiles(range(1, 3), range(2, 3), 2, 2, 5) == [[11, 15]]
