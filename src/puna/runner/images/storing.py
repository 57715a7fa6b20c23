"""What cross attention keeps of an image, a part of its rows between two steps: nobody's decoding waits for more than that."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from puna.runner.images.image import Rows
from puna.runner.images.in_sequence import ImageAt
from puna.runner.images.prices import Prices

FEWEST = 16  # rows of what nobody has stored yet

_ROW = "row"


class Homes(Protocol):
    """Where it is kept: of each sequence the rows of the image whose token it computes next. One thread, the engine's."""

    most_rows: int  # at once

    def n_stored(self, sequence: int) -> int:
        """None once the sequence is cut, whoever has it then."""

    def store(self, sequence: int, rows: Rows, begin: int) -> bool:
        """Those before are there. False where it was aborted. Errors: those of computing."""


class Storing:
    """All rows take about as long, of whichever image."""

    def __init__(self, homes: Homes, clock: Callable[[], float] = time.perf_counter) -> None:
        self.homes = homes
        self.n_parts = 0  # computed so far
        self._clock = clock
        self._prices = Prices()

    def is_stored(self, sequence: int, images: Sequence[ImageAt]) -> bool:
        """Whether the sequence may go on with what is looked at next, if anything is."""
        return self.homes.n_stored(sequence) >= sum(at.image.n_rows for at in images)

    def advance(self, sequence: int, images: Sequence[ImageAt], seconds: float) -> None:
        """Store as many rows of these as take about so long, and a few at least."""
        until = self._clock() + seconds
        n = max(self._prices.n_rows(_ROW, seconds), FEWEST)
        while n > 0 and not self.is_stored(sequence, images):
            begin = self.homes.n_stored(sequence)
            rows = _some(images, begin, begin + min(n, self.homes.most_rows))
            began = self._clock()
            if not self.homes.store(sequence, rows, begin):
                return
            self.n_parts += 1
            self._prices.learn_rows(_ROW, len(rows), self._clock() - began)
            n = self._prices.n_rows(_ROW, until - self._clock())


def _some(images: Sequence[ImageAt], begin: int, end: int) -> Rows:
    """Of the images' rows, one after another, [begin, end) as far as there are any."""
    found, first = [], 0
    for at in images:
        assert at.image.rows is not None, "an image that is not encoded is not looked at"
        found.append(at.image.rows[max(begin - first, 0) : max(end - first, 0)])
        first += at.image.n_rows
    return found[0] if len(found) == 1 else np.concatenate(found)
