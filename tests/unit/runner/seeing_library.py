"""As the model that checks what it sees, for the caches over libllama: here its memory is made of lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tests.unit.runner.seeing import FULL, STATE, Layer, SeeingModel, digest, state_hash

from puna.compat.cache import AttentionCache, StateCache
from puna.kvcache.batch import Batch, runs
from puna.kvcache.cache import Limits

KINDS: dict[str, list[Layer]] = {
    "libllama, full": [FULL],
    "libllama, recurrent": [STATE],
    "libllama, recurrent and full": [STATE, FULL],
}


class Memory:
    """What libllama keeps: of each sequence its cells, which others may have as well, and the state after the last."""

    def __init__(self, n_sequences: int, *, is_whole: bool) -> None:
        self._is_whole = is_whole  # a part of a sequence cannot be forgotten
        self.cells: list[list[list[float]]] = [[] for _ in range(n_sequences)]  # [position, token] each
        self.states = [0.0] * n_sequences

    def remove(self, sequence: int, begin: int, end: int = -1) -> bool:
        end = end if end >= 0 else 1 << 30
        kept = [cell for cell in self.cells[sequence] if not begin <= cell[0] < end]
        if kept and self._is_whole and len(kept) < len(self.cells[sequence]):
            return False
        self.cells[sequence] = kept
        if not kept:
            self.states[sequence] = 0
        return True

    def share(self, source: int, target: int, end: int) -> None:
        assert not self.cells[target], "the target must be empty"
        assert end < 0 or not self._is_whole, "a whole sequence or nothing"
        self.cells[target] = [cell for cell in self.cells[source] if end < 0 or cell[0] < end]
        self.states[target] = self.states[source]

    def move(self, sequence: int, begin: int, change: int) -> None:
        for cell in self.cells[sequence]:
            if cell[0] >= begin:
                cell[0] += change

    def clear(self) -> None:
        self.cells = [[] for _ in self.cells]
        self.states = [0.0] * len(self.states)

    def first(self, sequence: int) -> int:
        return int(min((cell[0] for cell in self.cells[sequence]), default=-1))

    def last(self, sequence: int) -> int:
        return int(max((cell[0] for cell in self.cells[sequence]), default=-1))


class LibraryModel(SeeingModel):
    memory: Memory
    n_cells: int

    def _begin(self, batch: Batch) -> None:
        self._cache.check_room(batch)

    def _totals(self, batch: Batch) -> Any:
        totals = np.zeros(batch.n_tokens)
        is_spoilt = self._is_spoilt(batch)
        for sequence, begin, end in runs(batch.sequences):
            for row in range(begin, end):
                token = np.nan if is_spoilt[row] else float(batch.tokens[row])
                self.memory.cells[sequence].append([float(batch.positions[row]), token])
                totals[row] = self._seen(sequence, token)
        self._cache.add(batch)
        if FULL in self._layers:
            assert len({id(cell) for cells in self.memory.cells for cell in cells}) <= self.n_cells
        return totals

    def _seen(self, sequence: int, token: float) -> float:
        """The last row of a sequence sees all of it."""
        state = self.memory.states[sequence]
        self.memory.states[sequence] = np.nan if np.isnan(state + token) else state_hash(int(state), [int(token)])
        held = np.array(self.memory.cells[sequence])
        if np.isnan(held).any():
            assert self._spoilt_from(sequence) < len(held), f"sequence {sequence} sees NaN"
            return np.nan
        history = self._history(sequence)[: len(held)]
        assert held[:, 0].tolist() == list(range(len(held))), f"sequence {sequence} sees {held[:, 0]}"
        assert held[:, 1].tolist() == list(history), f"sequence {sequence} sees other tokens"
        if STATE in self._layers:
            assert self.memory.states[sequence] == state_hash(0, history), f"sequence {sequence}: another state"
        attended = digest(held[:, 1].astype(int), held[:, 0].astype(int)) if FULL in self._layers else 0
        return attended + (self.memory.states[sequence] if STATE in self._layers else 0)


def make_library_cache(layers: Sequence[Layer], limits: Limits) -> tuple[Any, Memory]:
    memory = Memory(limits.max_sequences, is_whole=STATE in layers)
    opened: Any = lambda: memory  # noqa: E731
    if FULL not in layers:
        return StateCache(opened, limits), memory
    is_hybrid = STATE in layers
    return AttentionCache(opened, limits, limits.n_cells, window=0, can_shift=True, is_hybrid=is_hybrid), memory
