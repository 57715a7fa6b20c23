"""A cache that has each sequence's tokens themselves, so that what is resumed can be compared with what was asked for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from puna.kvcache.cells import CacheFull

ROW_BYTES = 100


@dataclass(frozen=True)
class SavedTokens:
    rows: list[int]
    resumes_every: int

    @property
    def n_bytes(self) -> int:
        return ROW_BYTES * len(self.rows)

    def resume_point(self, position: int) -> int:
        position = min(position, len(self.rows))
        return position // self.resumes_every * self.resumes_every


class SavingTokenCache:
    """Goes on only after each so many tokens: 1 as full attention, 10 as with checkpoints. *n_pool* for all sequences."""

    def __init__(self, n_sequences: int, n_pool: int = 1 << 30, resumes_every: int = 1) -> None:
        self.n_pool = n_pool
        self.resumes_every = resumes_every
        self.rows: list[list[int]] = [[] for _ in range(n_sequences)]
        self.n_shared = [0] * n_sequences  # of each, rows that take no room since they lie elsewhere
        self.n_saves = 0
        self.is_short_of_memory = False

    @property
    def n_cells(self) -> int:
        return self.n_pool

    @property
    def n_free(self) -> int:
        return self.n_pool - sum(self._own(s) for s in range(len(self.rows)))

    def _own(self, sequence: int) -> int:
        return max(len(self.rows[sequence]) - self.n_shared[sequence], 0)

    def n_freed(self, sequences: Collection[int], kept_by: int = -1, n_kept: int = 0) -> int:
        return sum(self._own(s) for s in sequences) - (min(n_kept, self._own(kept_by)) if n_kept else 0)

    def length(self, sequence: int) -> int:
        return len(self.rows[sequence])

    def can_resume(self, sequence: int, position: int) -> bool:
        return self.prepare_restore(sequence, position) == position

    def prepare_restore(self, sequence: int, position: int) -> int:
        return SavedTokens(self.rows[sequence], self.resumes_every).resume_point(position)

    def remove(self, sequence: int, begin: int, end: int | None = None, *, n_positions: int = 0) -> None:
        del self.rows[sequence][begin:end]
        self.n_shared[sequence] = min(self.n_shared[sequence], begin)

    def copy_prefix(self, source: int, target: int, length: int, *, by_reference: bool = False) -> None:
        assert source != target
        self.rows[target] = self.rows[source][:length]
        self.n_shared[target] = length if by_reference else 0

    def share_prefix(self, source: int, target: int, length: int) -> None:
        assert self.rows[source][:length] == self.rows[target][:length]
        self.n_shared[target] = max(self.n_shared[target], length)

    def check_integrity(self) -> None:
        assert self.n_free >= 0

    def saved_bytes(self, sequence: int, *, lean: bool = False) -> int:
        return ROW_BYTES * len(self.rows[sequence])

    def save(self, sequence: int, *, lean: bool = False) -> SavedTokens:
        if self.is_short_of_memory:
            raise MemoryError
        self.n_saves += 1
        return SavedTokens(list(self.rows[sequence]), self.resumes_every)

    def restore(self, sequence: int, saved: Any, length: int) -> None:
        assert not self.rows[sequence]
        assert saved.resume_point(length) == length
        if length > self.n_free:
            raise CacheFull(length, self.n_free)
        self.rows[sequence] = saved.rows[:length]
