"""One image at a time through the encoder, a part of its layers between two steps: nobody's decoding waits for more than that.

What lies between two parts is in the host's memory. How long a layer takes is learnt from those before it.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from puna.errors import PunaError
from puna.runner.images.image import Image, Rows
from puna.vision.model import Piece

States = Sequence[npt.NDArray[np.float32]]

# Of what was learnt, the share that the newest measurement does not replace.
_KEPT = 0.5


class Encoder(Protocol):
    """What computes. One thread, the engine's."""

    n_layers: int

    def run(self, piece: Piece, states: States | None, begin: int, end: int) -> States | None:
        """The layers [begin, end) of a piece, from what those before gave; the first begins with the piece itself, and what
        follows the last gives its rows [n, n_out], alone. None when it was aborted.

        Errors: OutOfMemory.
        """


class Encoding:
    """``image`` is the one under way, with what is computed of it."""

    def __init__(self, encoder: Encoder) -> None:
        self.image: Image | None = None
        self._encoder = encoder
        self._rows: list[Rows] = []  # of the pieces that are done
        self._states: States | None = None
        self._n_done = 0  # layers of the piece under way
        self._layer_s: dict[Hashable, float] = {}  # by the shape of a piece
        self.n_parts = 0  # computed so far

    def begin(self, image: Image) -> None:
        """It is the one under way from now on; what was computed of another is given up."""
        self.image = image
        self._rows, self._states, self._n_done = [], None, 0

    def drop(self) -> None:
        self.image = None
        self._rows, self._states, self._n_done = [], None, 0

    def advance(self, seconds: float) -> Rows | None:
        """Compute as many layers of a piece as take about so long, at least one; the image's rows once they are all there.

        Errors: PunaError for an image whose rows are no numbers; those of the encoder.
        """
        image = self.image
        assert image is not None
        assert image.pieces is not None
        piece, n_layers = image.pieces[len(self._rows)], self._encoder.n_layers
        learnt = self._layer_s.get(piece.key)
        n_most = 1 if learnt is None else max(int(min(seconds / max(learnt, 1e-9), n_layers)), 1)
        end = min(self._n_done + n_most, n_layers)
        began = time.perf_counter()
        states = self._encoder.run(piece, self._states, self._n_done, end)
        if states is None:
            return None
        self.n_parts += 1
        self._learn(piece.key, (time.perf_counter() - began) / max(end - self._n_done, 1))
        if end < n_layers:
            self._states, self._n_done = states, end
            return None
        (rows,) = states
        self._rows.append(np.array(rows, np.float32))
        self._states, self._n_done = None, 0
        if len(self._rows) < len(image.pieces):
            return None
        whole = self._rows[0] if len(self._rows) == 1 else np.concatenate(self._rows)
        self.drop()
        if len(whole) != image.n_rows or not np.isfinite(whole).all():
            raise PunaError("an image was encoded to what are no numbers")
        return whole

    def _learn(self, key: Hashable, layer_s: float) -> None:
        before = self._layer_s.get(key)
        self._layer_s[key] = layer_s if before is None else _KEPT * before + (1 - _KEPT) * layer_s
        if len(self._layer_s) > 256:  # shapes are as many as images have sizes
            del self._layer_s[next(iter(self._layer_s))]
