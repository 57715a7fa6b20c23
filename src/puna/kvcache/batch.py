"""The tokens of one engine step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]

N_AXES = 4  # of M-RoPE: time, height, width, and one that no family uses yet


@dataclass(frozen=True)
class Encoded:
    """What an encoder made of the image or sound that the token at this position stands for: n_rows vectors."""

    sequence: int
    position: int
    n_rows: int


@dataclass(frozen=True)
class Embedded:
    """Rows of a batch that come as embeddings instead of tokens: those of an image, say.

    Shapes: rows int32 [m], ascending; values float32 [m, n_embd], what the first layer gets.
    """

    rows: Ints
    values: npt.NDArray[np.float32]


class Batch(NamedTuple):
    """Rows of one step; the rows of a sequence stand together, in the order of their positions.

    Shapes: tokens, positions, sequences int32 [n]; outputs int32 [m], the rows whose logits are wanted, ascending.
    *bidirectional* are rows [begin, end) of one sequence that see each other, also the later ones: the tokens of an image.
    Encoded are the images whose token comes with this step, for cross attention to look at, at most one of a sequence; what
    layers keep of them is stored before.
    Embedded rows have tokens all the same, for what else a model looks up by token. *axes* int32 [4, n] are the positions that
    models with M-RoPE turn by; None: those of text, see text_axes. The order in a sequence is that of positions either way.
    """

    tokens: Ints
    positions: Ints
    sequences: Ints
    outputs: Ints
    bidirectional: tuple[tuple[int, int], ...] = ()
    encoded: tuple[Encoded, ...] = ()
    embedded: Embedded | None = None
    axes: Ints | None = None

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def n_outputs(self) -> int:
        return len(self.outputs)

    @property
    def n_embedded(self) -> int:
        return len(self.embedded.rows) if self.embedded else 0


def batch(
    tokens: Any,
    positions: Any,
    sequences: Any,
    outputs: Any,
    bidirectional: Sequence[tuple[int, int]] = (),
    encoded: Sequence[Encoded] = (),
    embedded: tuple[Any, Any] | None = None,
    axes: Any = None,
) -> Batch:
    """From anything that numpy takes; *embedded* are rows and their values."""
    a, b, c, d = [np.ascontiguousarray(x, dtype=np.int32) for x in (tokens, positions, sequences, outputs)]
    given = None
    if embedded is not None and len(embedded[0]):
        rows, values = embedded
        given = Embedded(np.ascontiguousarray(rows, dtype=np.int32), np.ascontiguousarray(values, dtype=np.float32))
    turned = None if axes is None else np.ascontiguousarray(axes, dtype=np.int32)
    return Batch(a, b, c, d, tuple(bidirectional), tuple(encoded), given, turned)


def text_axes(positions: Ints) -> Ints:
    """Positions [n] of text along the axes of M-RoPE, [4, n]: text moves along the first three at once (Wang et al. 2024)."""
    return np.stack([positions, positions, positions, np.zeros_like(positions)])


def runs(sequences: Ints) -> list[tuple[int, int, int]]:
    """(sequence, begin row, end row) of each group of rows."""
    found: list[tuple[int, int, int]] = []
    begin = 0
    for sequence, rows in groupby(sequences.tolist()):
        end = begin + len(list(rows))
        found.append((sequence, begin, end))
        begin = end
    return found
