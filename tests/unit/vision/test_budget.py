"""Sizes that images of their own proportions are resized to; the numbers are worked out by hand from the published rule."""

from __future__ import annotations

import pytest

from puna.errors import BadRequest
from puna.vision.budget import MAX_ASPECT, Budget

PATCHES = Budget(28, 8 * 28**2, 4096 * 28**2)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((1000, 700), (1008, 700)),  # 35.7 and 25 multiples
        ((1920, 1080), (1932, 1092)),
        ((42, 280), (56, 280)),  # one and a half: to the even one
        ((70, 280), (56, 280)),  # two and a half likewise
        ((280, 13), (280, 28)),  # less than half a multiple: one all the same
        ((4000, 3000), (2044, 1540)),  # shrunk by 1.933, then whole multiples down
        ((100, 20000), (112, 19992)),
        ((200, 40000), (112, 25340)),
        ((56, 56), (84, 84)),  # grown by the root of 2, then up
        ((1, 1), (84, 84)),
        ((2, 400), (28, 392)),
        ((30, 30), (84, 84)),
    ],
)
def test_the_nearest_multiples_within_the_bounds(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert PATCHES.fit(*size) == expected
    assert PATCHES.fit(*size[::-1]) == expected[::-1]


@pytest.mark.parametrize("size", [(1, 201), (3, 601), (20100, 100)])
def test_an_image_that_is_too_thin_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(BadRequest, match=f"{size[0]} x {size[1]} pixels is more than {MAX_ASPECT} times"):
        PATCHES.fit(*size)


@pytest.mark.parametrize("n_most", [*range(1, 60), 997, 4096])
def test_the_largest_is_as_large_as_any_and_stays_so(n_most: int) -> None:
    budget = Budget(10, 1, n_most * 100 + 99)
    width, height = budget.largest()
    assert budget.fit(width, height) == (width, height)
    sizes = [(a, b) for a in range(1, n_most + 1) for b in (min(n_most // a, MAX_ASPECT * a),) if a <= MAX_ASPECT * b]
    assert width * height == 100 * max(a * b for a, b in sizes)
