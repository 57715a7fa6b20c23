"""Attention without a history, for models whose tokens see all of their own text: nothing outlives a step.

It has the face of a cache, so that such models are written and run like all others. A text must be in one batch as a
whole; several texts share a batch, and a mask keeps them apart.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import numpy.typing as npt

from puna.kvcache.batch import Batch
from puna.kvcache.cache import Attended
from puna.ml.backend import Context
from puna.ml.tensor import DType, Tensor


class Uncached:
    """Keys and values of a layer live in the graph, between put and get."""

    n_free = 1 << 62  # room for any number of tokens

    def __init__(self) -> None:
        self._n_tokens = 0
        self._batch: Batch | None = None
        self._mask_input: Tensor | None = None
        self._stored: tuple[Tensor, Tensor] | None = None

    # For models.

    def layer(self, index: int) -> None:
        self._stored = None

    def put(self, ctx: Context, key: Tensor, value: Tensor) -> None:
        self._stored = key, value

    def get(self, ctx: Context) -> list[Attended]:
        assert self._stored is not None, "put comes before get"
        assert self._mask_input is not None, "make_inputs comes before the model's forward"
        key, value = (x.permute(0, 2, 1, 3).cast(DType.F16) for x in self._stored)
        return [Attended(0, self._n_tokens, 1, key, value, self._mask_input)]

    # For the runner.

    def start_forward(self, batch: Batch) -> Hashable:
        self._n_tokens, self._batch = batch.n_tokens, batch
        return batch.n_tokens

    def start_reserve(self, n_tokens: int) -> Hashable:
        self._n_tokens, self._batch = n_tokens, None
        return n_tokens

    def make_inputs(self, ctx: Context) -> None:
        self._mask_input = ctx.input(DType.F16, self._n_tokens, self._n_tokens, 1, 1)

    def set_inputs(self, ctx: Context) -> None:
        assert self._mask_input is not None
        assert self._batch is not None, "a reserved graph is never computed"
        ctx.set(self._mask_input, block_mask(self._batch.sequences))

    def check_room(self, batch: Batch) -> None:
        """There always is."""

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        assert length == 0, "there is nothing to copy"

    def can_resume(self, sequence: int, position: int) -> bool:
        return position == 0

    def prepare_restore(self, sequence: int, position: int) -> int:
        return 0

    def remove(self, sequence: int, begin: int, end: int | None = None) -> None:
        """Nothing is held."""

    def check_remove(self, sequence: int, begin: int, end: int) -> None:
        """Nothing is held."""

    def length(self, sequence: int) -> int:
        return 0

    def check_integrity(self) -> None:
        """There is nothing that could contradict itself."""


def block_mask(sequences: npt.NDArray[np.int32]) -> npt.NDArray[np.float16]:
    """0 where two rows are of the same sequence, -inf elsewhere: [n, n]."""
    return np.where(sequences[:, None] == sequences[None, :], np.float16(0), np.float16(-np.inf))
