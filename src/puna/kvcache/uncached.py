"""Attention without a history, for models whose tokens see all of their own text: nothing outlives a step.

It has the face of a cache, so that such models are written and run like all others. A text must be in one batch as a
whole; several texts share a batch, and a mask keeps them apart.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from puna.kvcache.batch import Batch
from puna.kvcache.cache import UNLIMITED, Attended
from puna.ml.backend import Context
from puna.ml.tensor import DType, Tensor


class Uncached:
    """Keys and values of a layer live in the graph, between put and get."""

    n_cells, n_free = 0, UNLIMITED

    def __init__(self, windows: Sequence[int] = ()) -> None:
        """*windows* by layer, half of each to either side of a token; 0, or none given: all of the text."""
        self._n_tokens = 0
        self._batch: Batch | None = None
        self._windows = windows
        self._window = 0  # of the current layer
        self._masks: dict[int, Tensor] = {}  # by window
        self._stored: tuple[Tensor, Tensor] | None = None

    # For models.

    def layer(self, index: int) -> None:
        self._stored = None
        self._window = self._windows[index] if self._windows else 0

    def put(self, ctx: Context, key: Tensor, value: Tensor) -> None:
        self._stored = key, value

    def get(self, ctx: Context) -> list[Attended]:
        assert self._stored is not None, "put comes before get"
        assert self._masks, "make_inputs comes before the model's forward"
        key, value = (x.permute(0, 2, 1, 3).cast(DType.F16) for x in self._stored)
        return [Attended(0, self._n_tokens, 1, key, value, self._masks[self._window])]

    # For the runner.

    def start_forward(self, batch: Batch) -> Hashable:
        self._n_tokens, self._batch = batch.n_tokens, batch
        return batch.n_tokens

    def start_reserve(self, n_tokens: int) -> Hashable:
        self._n_tokens, self._batch = n_tokens, None
        return n_tokens

    def look_ahead(self, batch: Batch) -> Hashable | None:
        return None

    @property
    def inputs(self) -> object:
        return self._masks

    @inputs.setter
    def inputs(self, made: Any) -> None:
        self._masks = made

    def make_inputs(self, ctx: Context) -> None:
        shape = self._n_tokens, self._n_tokens, 1, 1
        self._masks = {window: ctx.input(DType.F16, *shape) for window in dict.fromkeys(self._windows or [0])}

    def set_inputs(self, ctx: Context) -> None:
        assert self._batch is not None, "a reserved graph is never computed"
        for window, mask in self._masks.items():
            ctx.set(mask, block_mask(self._batch.sequences, self._batch.positions, window))

    def check_room(self, batch: Batch) -> None:
        """There always is."""

    def n_freed(self, sequences: Collection[int], kept_by: int = -1, n_kept: int = 0) -> int:
        return 0

    def copy_prefix(self, source: int, target: int, length: int, *, by_reference: bool = False) -> None:
        assert length == 0, "there is nothing to copy"

    def share_prefix(self, source: int, target: int, length: int) -> None:
        assert length == 0, "there is nothing to share"

    def can_resume(self, sequence: int, position: int) -> bool:
        return position == 0

    def prepare_restore(self, sequence: int, position: int) -> int:
        return 0

    def remove(self, sequence: int, begin: int, end: int | None = None, *, n_positions: int = 0) -> None:
        """Nothing is held."""

    def check_remove(self, sequence: int, begin: int, end: int) -> None:
        """Nothing is held."""

    def length(self, sequence: int) -> int:
        return 0

    def check_integrity(self) -> None:
        """There is nothing that could contradict itself."""


def block_mask(sequences: npt.NDArray[np.int32], positions: npt.NDArray[np.int32], window: int = 0) -> npt.NDArray[np.float16]:
    """0 where two rows are of the same sequence and at most half a window apart, -inf elsewhere: [n, n]."""
    sees = sequences[:, None] == sequences[None, :]
    if window:
        sees &= np.abs(positions[:, None] - positions[None, :]) <= window // 2
    return np.where(sees, np.float16(0), np.float16(-np.inf))
