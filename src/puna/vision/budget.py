"""Images at their own proportions: resized until their patches are whole and their pixels within bounds, and no further."""

from __future__ import annotations

import math
from dataclasses import dataclass

from puna.errors import BadRequest

MAX_ASPECT = 200  # of the longer side to the shorter, as the published processors have it

Size = tuple[int, int]  # width, height


def check_aspect(width: int, height: int) -> None:
    """Errors: BadRequest for an image so thin that one of its sides would not be what it was."""
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise BadRequest(f"an image of {width} x {height} pixels is more than {MAX_ASPECT} times as long as it is wide")


@dataclass(frozen=True)
class Budget:
    """Both sides are multiples of one number, their product is between two."""

    multiple: int
    low: int
    high: int

    def fit(self, width: int, height: int) -> Size:
        """The size that an image is resized to: the nearest multiples, unless that is too much or too little (Wang et al. 2024).

        Errors: BadRequest for an image that is too thin.
        """
        check_aspect(width, height)
        sides = [max(round(side / self.multiple), 1) * self.multiple for side in (width, height)]
        if sides[0] * sides[1] > self.high:
            shrink = math.sqrt(width * height / self.high)
            sides = [max(math.floor(side / shrink / self.multiple), 1) * self.multiple for side in (width, height)]
        elif sides[0] * sides[1] < self.low:
            grow = math.sqrt(self.low / (width * height))
            sides = [math.ceil(side * grow / self.multiple) * self.multiple for side in (width, height)]
        return sides[0], sides[1]

    def largest(self) -> Size:
        """The size with the most pixels that stays what it is."""
        n_most = self.high // self.multiple**2
        rows = range(max(math.isqrt(n_most // MAX_ASPECT), 1), math.isqrt(n_most) + 1)
        # Of equally many pixels the nearest to a square.
        best = max((min(n_most // n, MAX_ASPECT * n) * n, n) for n in rows)[1]
        return min(n_most // best, MAX_ASPECT * best) * self.multiple, best * self.multiple
