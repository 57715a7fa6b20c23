"""The tokens of one engine step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Encoded:
    """What an encoder made of the image or sound that the token at this position stands for: n_rows vectors."""

    sequence: int
    position: int
    n_rows: int


class Batch(NamedTuple):
    """Rows of one step; the rows of a sequence stand together, in the order of their positions.

    Shapes: tokens, positions, sequences int32 [n]; outputs int32 [m], the rows whose logits are wanted, ascending.
    *bidirectional* are rows [begin, end) of one sequence that see each other, also the later ones: the tokens of an image.
    Encoded are the inputs of cross attention that come with this step, at most one of a sequence, in the order of rows.
    """

    tokens: Ints
    positions: Ints
    sequences: Ints
    outputs: Ints
    bidirectional: tuple[tuple[int, int], ...] = ()
    encoded: tuple[Encoded, ...] = ()

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def n_outputs(self) -> int:
        return len(self.outputs)


def batch(
    tokens: Any,
    positions: Any,
    sequences: Any,
    outputs: Any,
    bidirectional: Sequence[tuple[int, int]] = (),
    encoded: Sequence[Encoded] = (),
) -> Batch:
    """From anything that numpy takes."""
    a, b, c, d = [np.ascontiguousarray(x, dtype=np.int32) for x in (tokens, positions, sequences, outputs)]
    return Batch(a, b, c, d, tuple(bidirectional), tuple(encoded))


def runs(sequences: Ints) -> list[tuple[int, int, int]]:
    """(sequence, begin row, end row) of each group of rows."""
    found: list[tuple[int, int, int]] = []
    begin = 0
    for sequence, rows in groupby(sequences.tolist()):
        end = begin + len(list(rows))
        found.append((sequence, begin, end))
        begin = end
    return found
