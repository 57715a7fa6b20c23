"""From the parts of a step to its batch, and from the rows that come out of it back to the tasks that need them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from puna.kvcache.batch import Batch
from puna.runner.scheduling.task import Part, T
from puna.runner.scheduling.workload import Rows
from puna.runner.step.forward import Compute


class Collected(NamedTuple):
    """Rows of a batch, task after task."""

    tokens: list[int]
    positions: list[int]
    sequences: list[int]
    outputs: list[int]
    bounds: list[int]  # the outputs [bounds[i], bounds[i + 1]) are those of part i

    @property
    def batch(self) -> Batch:
        tokens, positions, sequences = np.array((self.tokens, self.positions, self.sequences), np.int32)
        # A graph without outputs would have no end; a row that nobody needs is cheap.
        return Batch(tokens, positions, sequences, np.array(self.outputs or [len(self.positions) - 1], np.int32))


def collect(parts: Sequence[Part[T]]) -> Collected:
    """The rows of a step, and which of them are outputs: of each task none, one or several. Tokens not known yet are 0."""
    tokens: list[int] = []
    positions: list[int] = []
    sequences: list[int] = []
    outputs: list[int] = []
    bounds = [0]
    for task, begin, n_tokens in parts:
        end, first = begin + n_tokens, len(positions)
        tokens += task.tokens[begin:end]
        positions += range(begin, end)
        sequences += [task.slot] * n_tokens
        for row in task.output_rows(begin, n_tokens):
            outputs.append(first + row)
        bounds.append(len(outputs))
        tokens += [0] * (len(positions) - len(tokens))
    return Collected(tokens, positions, sequences, outputs, bounds)


def compute(forward: Compute, parts: Sequence[Part[T]]) -> list[Rows] | None:
    """For each part the outputs that its task needs, [n, n_vocab] or [n, n_embd], valid until the next step.

    None when the step was aborted.
    """
    rows = collect(parts)
    computed = forward(rows.batch)
    return None if computed is None else [computed[begin:end] for begin, end in pairwise(rows.bounds)]
