"""From the parts of a step to its batch, and from the rows that come out of it back to the tasks that need them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from puna.kvcache.batch import Batch, Embedded, Encoded
from puna.runner.images.in_sequence import Range, axes, bidirectional, have_axes, looked_at, shown
from puna.runner.scheduling.task import Part, T
from puna.runner.scheduling.workload import Rows
from puna.runner.step.forward import Compute


@dataclass
class Collected:
    """Rows of a batch, task after task."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    bounds: list[int] = field(default_factory=lambda: [0])  # the outputs [bounds[i], bounds[i + 1]) are those of part i
    images: Images | None = None

    @property
    def batch(self) -> Batch:
        tokens, positions, sequences = np.array((self.tokens, self.positions, self.sequences), np.int32)
        # A graph without outputs would have no end; a row that nobody needs is cheap.
        made = Batch(tokens, positions, sequences, np.array(self.outputs or [len(self.positions) - 1], np.int32))
        return made if self.images is None else self.images.within(made)


@dataclass
class Images:
    """What of a batch is not text."""

    bidirectional: list[Range] = field(default_factory=list)
    encoded: list[Encoded] = field(default_factory=list)
    rows: list[npt.NDArray[np.int32]] = field(default_factory=list)
    values: list[npt.NDArray[np.float32]] = field(default_factory=list)
    axes: list[npt.NDArray[np.int32]] = field(default_factory=list)  # of all parts, where any has others than text would
    has_axes: bool = False

    def add(self, part: Part[T], first: int) -> None:
        """A part whose rows begin at *first*; of one without images only its positions count."""
        task, begin, end = part.task, part.begin, part.end
        if self.has_axes:
            self.axes.append(axes(task.images, begin, end))
        if task.n_looked_at:
            self._look_at(part)
            return
        self.bidirectional += [
            (first + low - begin, first + high - begin) for low, high in bidirectional(task.images, begin, end)
        ]
        for rows, values in shown(task.images, begin, end):
            self.rows.append(rows + np.int32(first))
            self.values.append(values)

    def _look_at(self, part: Part[T]) -> None:
        for at in part.task.images:
            if part.begin <= at.begin < part.end:
                together = looked_at(part.task.images, at, part.task.n_looked_at)
                self.encoded.append(Encoded(part.task.slot, at.begin, sum(one.image.n_rows for one in together)))

    def within(self, batch: Batch) -> Batch:
        """The batch with its images."""
        return batch._replace(
            bidirectional=tuple(self.bidirectional),
            encoded=tuple(self.encoded),
            embedded=Embedded(np.concatenate(self.rows), np.concatenate(self.values)) if self.rows else None,
            axes=np.concatenate(self.axes, axis=1) if self.has_axes else None,
        )


def collect(parts: Sequence[Part[T]]) -> Collected:
    """The rows of a step, and which of them are outputs: of each task none, one or several. Tokens not known yet are 0."""
    found = Collected()
    if any(part.task.images for part in parts):
        found.images = Images(has_axes=any(have_axes(part.task.images) for part in parts))
    for part in parts:
        task, begin, n_tokens = part
        end, first = begin + n_tokens, len(found.positions)
        found.tokens += task.tokens[begin:end]
        found.positions += range(begin, end)
        found.sequences += [task.slot] * n_tokens
        for row in task.output_rows(begin, n_tokens):
            found.outputs.append(first + row)
        found.bounds.append(len(found.outputs))
        found.tokens += [0] * (len(found.positions) - len(found.tokens))
        if found.images is not None:
            found.images.add(part, first)
    return found


def compute(forward: Compute, parts: Sequence[Part[T]]) -> list[Rows] | None:
    """For each part the outputs that its task needs, [n, n_vocab] or [n, n_embd], valid until the next step.

    None when the step was aborted.
    """
    rows = collect(parts)
    computed = forward(rows.batch)
    return None if computed is None else [computed[begin:end] for begin, end in pairwise(rows.bounds)]
