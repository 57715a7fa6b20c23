"""Which grid of tiles is nearest to an image's proportions, and of several as near which is taken."""

from __future__ import annotations

import pytest

from puna.vision.grid import nearest_grid


@pytest.mark.parametrize(
    ("width", "height", "bounds", "grid"),
    [
        (448, 448, (1, 12), (1, 1)),
        (800, 800, (1, 12), (2, 2)),  # more than half of its pixels, and less than half of those of 3 x 3
        (1500, 1500, (1, 12), (3, 3)),
        (2560, 1440, (1, 12), (4, 2)),
        (100, 900, (1, 12), (1, 9)),
        (5000, 10, (1, 12), (12, 1)),
        (300, 300, (2, 10), (2, 2)),
        (10, 10, (1, 1), (1, 1)),
    ],
)
def test_the_nearest_grid(width: int, height: int, bounds: tuple[int, int], grid: tuple[int, int]) -> None:
    assert nearest_grid(width, height, 448, *bounds) == grid
