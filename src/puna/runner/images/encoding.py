"""One image at a time through the encoder, a part of it between two steps: nobody's decoding waits for more than that.

What lies between two parts is in the host's memory. How long a part takes is learnt from those before it: what nobody has
computed yet begins with a few rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np

from puna.errors import PunaError
from puna.runner.images.course import Course, Encoder, States
from puna.runner.images.image import Image, Rows
from puna.runner.images.prices import Prices

__all__ = ["Encoder", "Encoding", "States"]


class Part(NamedTuple):
    """Whole layers of these kinds, or one of a kind that is not known; or rows of a stage."""

    layers: Sequence[Hashable]
    n_rows: int = 0


class Encoding:
    """``image`` is the one under way, with what is computed of it."""

    def __init__(self, encoder: Encoder, clock: Callable[[], float] = time.perf_counter) -> None:
        self.image: Image | None = None
        self.n_parts = 0  # computed so far
        self._encoder = encoder
        self._clock = clock
        self._rows: list[Rows] = []  # of the pieces that are done
        self._course: Course | None = None  # of the piece under way
        self._prices = Prices()  # of rows, and of layers
        self._sights: dict[int, Hashable] = {}  # of layers: who sees whom, as far as it says how long it takes

    def begin(self, image: Image) -> None:
        """It is the one under way from now on; what was computed of another is given up."""
        self.drop()
        self.image = image

    def drop(self) -> None:
        self.image = None
        self._rows, self._course = [], None

    def advance(self, seconds: float) -> Rows | None:
        """Compute as much of a piece as takes about so long; the image's rows once they are all there.

        Errors: PunaError for an image whose rows are no numbers; those of the encoder.
        """
        image = self.image
        assert image is not None
        assert image.pieces is not None
        if self._course is None:
            self._course = Course(self._encoder, image.pieces[len(self._rows)])
        course, until = self._course, self._clock() + seconds
        part: Part | None = self._next(course, seconds) or self._least(course)
        while part is not None:
            if not self._compute(course, part):
                self._course = None  # it was aborted
                return None
            part = None if course.rows is not None else self._next(course, until - self._clock())
        if course.rows is None:
            return None
        self._rows.append(np.array(course.rows, np.float32))
        self._course = None
        if len(self._rows) < len(image.pieces):
            return None
        whole = self._rows[0] if len(self._rows) == 1 else np.concatenate(self._rows)
        self.drop()
        if len(whole) != image.n_rows or not np.isfinite(whole).all():
            raise PunaError("an image was encoded to what are no numbers")
        return whole

    def _next(self, course: Course, seconds: float) -> Part | None:
        """What comes next and takes no longer, as far as is known."""
        layers, stage = self._layers(course, seconds), course.stage
        if layers:
            return Part(layers)
        if stage is None:
            return None
        n = stage.rows(self._prices.n_rows(stage.kind, seconds))
        return Part((), n) if n > 0 else None

    def _least(self, course: Course) -> Part:
        """The shortest of what comes next."""
        stage = course.stage
        if stage is None:
            return Part(())
        return Part((), stage.rows(stage.n_each))

    def _layers(self, course: Course, seconds: float) -> tuple[Hashable, ...]:
        """Kinds of the whole layers that come next and together take no longer."""
        found: list[Hashable] = []
        if not course.is_between or (course.stage is not None and not course.is_begun):
            return ()
        for index in range(course.layer, course.layer + course.n_layers_left):
            kind = self._kind(course, index)
            seconds -= self._prices.of(kind, math.inf)
            if course.last is not None and index == course.layer + course.n_layers_left - 1:
                seconds -= self._prices.of(course.last.kind, math.inf) * course.last.n_left
            if seconds < 0:
                break
            found.append(kind)
        return tuple(found)

    def _kind(self, course: Course, index: int) -> Hashable:
        return course.piece.key, "layer", self._sights.get(index)

    def _compute(self, course: Course, part: Part) -> bool:
        began, stage, layer = self._clock(), course.stage, course.layer
        if not (course.run_rows(part.n_rows) if part.n_rows else course.run_layers(max(len(part.layers), 1))):
            return False
        self.n_parts += 1
        seconds = self._clock() - began
        if not part.n_rows:
            kinds = part.layers or (self._kind(course, layer),)
            known = [self._prices.of(kind, 0.0) for kind in kinds]
            for kind, price in zip(kinds, known, strict=True):
                self._prices.learn(kind, seconds * price / sum(known) if sum(known) else seconds / len(kinds))
            return True
        assert stage is not None
        self._prices.learn_rows(stage.kind, part.n_rows, seconds)
        if course.layer > layer:
            self._sights[layer] = course.sight
            if self._kind(course, layer) not in self._prices:
                both = sum(course.n * self._prices.of(kind, 0.0) for kind in course.kinds_of_layer)
                self._prices.learn(self._kind(course, layer), both)
        return True
