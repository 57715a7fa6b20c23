"""One piece of an image on its way through an encoder, in parts: whole layers at once, or of one layer some rows after others.

A layer in parts has two stages: first what its rows look for, what they are found by and what they give; then all that comes of
looking. Before the first layer and behind the last is a stage as well. Knows no times.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from puna.vision.model import Divided, Piece

Array = npt.NDArray[np.float32]
States = Sequence[Array]


class Encoder(Protocol):
    """What computes. One thread, the engine's. What a method gives is None when it was aborted.

    Errors: OutOfMemory.
    """

    n_layers: int

    def run(self, piece: Piece, states: States | None, begin: int, end: int) -> States | None:
        """The layers [begin, end) of a piece, from what those before gave; the first begins with the piece itself, and what
        follows the last gives its rows [n, n_out], alone.
        """

    def by_rows(self, piece: Piece) -> RowEncoder | None:
        """What computes this piece some rows at a time; None where nothing can."""


class RowEncoder(Protocol):
    """Of a divided piece; again None where it was aborted."""

    def begin_rows(self, piece: Piece, begin: int, end: int) -> States | None:
        """What the first layer gets for these rows."""

    def look_for(self, piece: Piece, rows: Array, index: int, begin: int) -> tuple[Array, Hashable] | None:
        """Of a layer's rows from *begin* on what they look for, and who sees whom, as far as that says how long looking takes.
        What they are found by and give the encoder keeps, of one layer at a time.
        """

    def looked(self, piece: Piece, rows: Array, wanted: Array, index: int, begin: int) -> States | None:
        """The rows behind the layer, once it has been asked what all of them look for; and what it adds to the state."""

    def end_rows(self, piece: Piece, states: States, begin: int, end: int) -> Array | None:
        """Rows of the result, from those rows [begin, end) of a state that they are made of."""


# Attention takes fewer rows in another way, and a worse one: its sums are then in F16.
_FEWEST = 64


class Stage(NamedTuple):
    """What is computed row by row; rows of the same *kind* take about as long."""

    kind: Hashable
    n_left: int
    n_each: int  # rows that stay together

    def rows(self, most: int) -> int:
        """Of so many rows those that may be computed next, with as many of the last of them; none: fewer stay together."""
        n = most // self.n_each * self.n_each
        return self.n_left if n and self.n_left < n + self.n_each else min(n, self.n_left)


class Course:
    """Where a piece is. Once a method has said False, for what was aborted, the course is of no more use."""

    def __init__(self, encoder: Encoder, piece: Piece) -> None:
        self.piece = piece
        self.layer = 0  # the one that comes next, or is under way
        self.rows: Array | None = None  # what it was encoded to, in the end
        self._encoder = encoder
        self._by_rows = encoder.by_rows(piece)
        self._states: list[Array] | None = None
        self._made: list[Array] = []  # of the stage under way, in part
        self._row = 0  # of that stage
        self._wanted: Array | None = None  # once the layer's first stage is done
        self.sight: Hashable = None  # who sees whom in the last layer that was divided

    @property
    def n(self) -> int:
        """Rows of a state, where they can be told apart."""
        return self._divided.n if self._by_rows else 0

    @property
    def _divided(self) -> Divided:
        assert self.piece.divided is not None
        return self.piece.divided

    @property
    def is_begun(self) -> bool:
        """Whether it has come to its first layer."""
        return self._states is not None

    @property
    def is_between(self) -> bool:
        """Whether whole layers may come next."""
        return self._row == 0 and self._wanted is None

    @property
    def n_layers_left(self) -> int:
        return self._encoder.n_layers - self.layer

    def run_layers(self, n: int) -> bool:
        """So many, with what is before the first and behind the last; of none, what is behind."""
        end = min(self.layer + n, self._encoder.n_layers)
        states = self._encoder.run(self.piece, self._states, self.layer, end)
        if states is None:
            return False
        self.layer = end
        if end == self._encoder.n_layers:
            (self.rows,) = states
        else:
            self._states = list(states)
        return True

    @property
    def stage(self) -> Stage | None:
        """What comes next, row by row; None where the piece is not divided."""
        if self._by_rows is None:
            return None
        how = self._divided
        key = self.piece.key
        if self._states is None:
            return Stage((key, "begin"), how.n - self._row, how.n_each or 1 if how.begins else how.n)
        if not self.n_layers_left:
            assert self.last is not None
            return self.last._replace(n_left=self.last.n_left - self._row)
        n_each = how.n_each or 1
        return Stage(self.kinds_of_layer[self._wanted is not None], how.n - self._row, -(-_FEWEST // n_each) * n_each)

    @property
    def kinds_of_layer(self) -> tuple[Hashable, Hashable]:
        """Of its two stages."""
        return (self.piece.key, "look for"), (self.piece.key, "looked", self.sight)

    @property
    def last(self) -> Stage | None:
        """What is behind the last layer, all of it."""
        if self._by_rows is None:
            return None
        first, end = self._divided.used
        return Stage((self.piece.key, "end"), end - first, self._divided.n_each or end - first)

    def run_rows(self, n: int) -> bool:
        """The next so many of the stage, whole groups of those that stay together."""
        if self._states is None:
            return self._begin(n)
        if not self.n_layers_left:
            return self._end(n)
        return self._look_for(n) if self._wanted is None else self._looked(n)

    def _begin(self, n: int) -> bool:
        assert self._by_rows is not None
        if not self._divided.begins:
            states = self._encoder.run(self.piece, None, 0, 0)
            self._states = None if states is None else list(states)
            return states is not None
        begin, end = self._row, min(self._row + n, self._divided.n)
        if not self._keep(self._by_rows.begin_rows(self.piece, begin, end), end, self._divided.n):
            return False
        if not self._row:
            self._states, self._made = self._made, []
        return True

    def _look_for(self, n: int) -> bool:
        assert self._by_rows is not None
        assert self._states is not None
        begin, end = self._row, min(self._row + n, self._divided.n)
        found = self._by_rows.look_for(self.piece, self._states[0][begin:end], self.layer, begin)
        if found is None:
            return False
        wanted, self.sight = found
        self._keep([wanted], end, self._divided.n)
        if not self._row:
            (self._wanted,), self._made = self._made, []
        return True

    def _looked(self, n: int) -> bool:
        assert self._by_rows is not None
        assert self._states is not None
        assert self._wanted is not None
        begin, end = self._row, min(self._row + n, self._divided.n)
        rows = self._states[0][begin:end]
        if not self._keep(
            self._by_rows.looked(self.piece, rows, self._wanted[begin:end], self.layer, begin), end, self._divided.n
        ):
            return False
        if not self._row:
            first, *added = self._made
            self._states = [first, *self._states[1:], *added]
            self._made, self._wanted = [], None
            self.layer += 1
        return True

    def _end(self, n: int) -> bool:
        assert self._by_rows is not None
        assert self._states is not None
        how, (first, last) = self._divided, self._divided.used
        if not how.n_each:
            return self.run_layers(0)
        begin, end = self._row, min(self._row + n, last - first)
        states = [_of(state, first + begin, first + end, how.n) for state in self._states]
        rows = self._by_rows.end_rows(self.piece, states, first + begin, first + end)
        if rows is None or not self._keep([rows], end, last - first):
            return False
        if not self._row:
            (self.rows,) = self._made
        return True

    def _keep(self, parts: States | None, end: int, n: int) -> bool:
        """What the rows up to *end* of *n* gave; then the stage is at these, and back at 0 once it is through."""
        if parts is None:
            return False
        if not self._row:
            self._made = [np.empty((len(part) * n // end, *part.shape[1:]), np.float32) for part in parts]
        for whole, part in zip(self._made, parts, strict=True):
            _of(whole, self._row, end, n)[:] = part
        self._row = end % n
        return True


def _of(values: Array, begin: int, end: int, n: int) -> Array:
    """What there is for the rows [begin, end) of n: there may be one for each of them, or for several together."""
    return values[begin * len(values) // n : end * len(values) // n]
