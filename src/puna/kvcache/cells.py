"""Which cell of the pool holds which position of which sequences: bookkeeping only, no tensors.

A cell may belong to several sequences (a shared prefix) and is free when it belongs to none. A batch may go to any
free cells. Each sequence has a home, a range of its own, and fills it in order as long as it can, so that attention
reads a tight range; only when the home is full does a sequence spill into whatever is free.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from puna.errors import PunaError

FREE = -1


class CacheFull(PunaError):
    def __init__(self, n_wanted: int, n_free: int) -> None:
        super().__init__(f"the key/value cache has no room for {n_wanted} more tokens ({n_free} cells are free)")
        self.n_wanted = n_wanted
        self.n_free = n_free


class Cells:
    """Arrays over all cells. ``positions[c]`` is FREE or a token's position; ``members[s, c]`` says who sees it."""

    def __init__(self, n_cells: int, max_sequences: int) -> None:
        self.n_cells = n_cells
        self.max_sequences = max_sequences
        self.home_cells = n_cells // max_sequences
        self.positions = np.full(n_cells, FREE, np.int32)
        self.members = np.zeros((max_sequences, n_cells), np.bool_)
        self.n_owners = np.zeros(n_cells, np.int16)
        # Of each sequence: the tightest [begin, end) that holds all its cells, and how many those are.
        self.begins = np.zeros(max_sequences, np.int64)
        self.ends = np.zeros(max_sequences, np.int64)
        self.lengths = np.zeros(max_sequences, np.int64)

    @property
    def n_free(self) -> int:
        return int(np.count_nonzero(self.n_owners == 0))

    def place(self, sequence: int, positions: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Take a free cell for each position.

        Errors: CacheFull; then nothing has changed.
        """
        chosen = self._choose(sequence, len(positions))
        self.positions[chosen] = positions
        self.members[sequence, chosen] = True
        self.n_owners[chosen] = 1
        low, high = int(chosen.min()), int(chosen.max()) + 1
        if self.lengths[sequence]:
            low, high = min(low, int(self.begins[sequence])), max(high, int(self.ends[sequence]))
        self.begins[sequence], self.ends[sequence] = low, high
        self.lengths[sequence] += len(chosen)
        return chosen

    def _choose(self, sequence: int, count: int) -> npt.NDArray[np.int64]:
        home = sequence * self.home_cells
        begin = int(self.ends[sequence]) if self.lengths[sequence] else home
        end = begin + count
        # Holes that a removal left are filled first: the range stays as short as the history.
        has_holes = self.lengths[sequence] < self.ends[sequence] - self.begins[sequence]
        is_at_home = home <= begin and end <= home + self.home_cells
        if is_at_home and not has_holes and not self.n_owners[begin:end].any():
            return np.arange(begin, end)
        free = np.flatnonzero(self.n_owners == 0)
        if len(free) < count:
            raise CacheFull(count, len(free))
        # Own home first, in order; then whatever lies nearest to it.
        at_home = (free >= home) & (free < home + self.home_cells)
        distance = np.where(at_home, -1, np.abs(free - begin))
        order = np.argsort(distance, kind="stable")
        return np.sort(free[order[:count]])

    def remove(self, sequence: int, begin: int, end: int) -> None:
        """The sequence gives up the positions in [begin, end); a cell that nobody sees any more is free."""
        mine = self.members[sequence]
        gone = mine & (self.positions >= begin) & (self.positions < end)
        self.members[sequence, gone] = False
        self.n_owners[gone] -= 1
        self.positions[gone & (self.n_owners == 0)] = FREE
        self._measure(sequence)

    def share(self, target: int, cells: npt.NDArray[np.int64]) -> None:
        """The target sees these cells of another sequence too."""
        self.n_owners[cells] += ~self.members[target, cells]
        self.members[target, cells] = True
        self._measure(target)

    def shift(self, sequence: int, begin: int, delta: int) -> None:
        """Positions from *begin* on change by delta. The cells must not be shared."""
        moved = self.members[sequence] & (self.positions >= begin)
        self.positions[moved] += delta

    def is_shared(self, sequence: int, begin: int) -> bool:
        """Whether any cell at position *begin* or later belongs to another sequence too."""
        return bool((self.members[sequence] & (self.positions >= begin) & (self.n_owners > 1)).any())

    def cells_of(self, sequence: int, begin: int, end: int) -> npt.NDArray[np.int64]:
        """The cells of positions [begin, end), in the order of the positions."""
        found = np.flatnonzero(self.members[sequence] & (self.positions >= begin) & (self.positions < end))
        return found[np.argsort(self.positions[found], kind="stable")]

    def _measure(self, sequence: int) -> None:
        mine = np.flatnonzero(self.members[sequence])
        self.lengths[sequence] = len(mine)
        self.begins[sequence] = mine[0] if len(mine) else 0
        self.ends[sequence] = mine[-1] + 1 if len(mine) else 0

    def check_integrity(self) -> None:
        """Raise AssertionError when the arrays contradict each other: a bug here, never the caller's fault."""
        assert (self.members.sum(axis=0) == self.n_owners).all(), "owner counts differ from the members"
        assert ((self.positions == FREE) == (self.n_owners == 0)).all(), "a free cell has a position, or a used one none"
        for sequence in range(self.max_sequences):
            mine = np.flatnonzero(self.members[sequence])
            assert self.lengths[sequence] == len(mine), f"length of sequence {sequence}"
            if len(mine):
                assert self.begins[sequence] == mine[0], f"begin of sequence {sequence}"
                assert self.ends[sequence] == mine[-1] + 1, f"end of sequence {sequence}"
                assert len(np.unique(self.positions[mine])) == len(mine), f"sequence {sequence} has a position twice"


def padded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
