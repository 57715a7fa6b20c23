"""Which cell of the pool holds which position of which sequences: bookkeeping only, no tensors.

A cell may belong to several sequences (a shared prefix) and is free when it belongs to none. A batch may go to any
free cells. Each sequence has a home, a range of its own, where each position has its place, so that attention reads a tight range
and the same one in every batch: how rows are summed hangs on where they lie. Only when that place is taken does a sequence
fill the holes of its home, and only when the home is full does it spill into whatever is free.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from puna.errors import PunaError

FREE = -1
END = 2**31 - 1  # after every position


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
        # Of each sequence: the tightest [begin, end) that holds all its cells, how many those are, and the tightest
        # [first, next) that holds their positions.
        self.begins = [0] * max_sequences
        self.ends = [0] * max_sequences
        self.lengths = [0] * max_sequences
        self.firsts = [0] * max_sequences
        self.nexts = [0] * max_sequences
        self.n_free = n_cells  # kept, not counted when asked for: other threads ask, too

    def place(self, sequence: int, positions: npt.NDArray[np.int32]) -> Sequence[int]:
        """Take a free cell for each position, which ascend.

        Errors: CacheFull; then nothing has changed.
        """
        chosen = self._choose(sequence, len(positions), int(positions[0]))
        at = slice(chosen.start, chosen.stop) if isinstance(chosen, range) else chosen
        self.positions[at] = positions
        self.members[sequence, at] = True
        self.n_owners[at] = 1
        self.n_free -= len(chosen)
        begin, end = _bounds(chosen)
        first, after = int(positions[0]), int(positions[-1]) + 1
        if self.lengths[sequence]:
            begin, end = min(begin, self.begins[sequence]), max(end, self.ends[sequence])
            first, after = min(first, self.firsts[sequence]), max(after, self.nexts[sequence])
        self.begins[sequence], self.ends[sequence] = begin, end
        self.firsts[sequence], self.nexts[sequence] = first, after
        self.lengths[sequence] += len(chosen)
        return chosen

    def place_at(self, sequence: int, cells: npt.NDArray[np.int64], positions: npt.NDArray[np.int32]) -> None:
        """Take these cells, which are free, for these positions."""
        assert not self.n_owners[cells].any(), f"sequence {sequence} would take the cells of another"
        self.positions[cells] = positions
        self.members[sequence, cells] = True
        self.n_owners[cells] = 1
        self.n_free -= len(cells)
        low, high = int(cells.min()), int(cells.max()) + 1
        if self.lengths[sequence]:
            low, high = min(low, self.begins[sequence]), max(high, self.ends[sequence])
        self._measure(sequence, low, high)

    def _choose(self, sequence: int, count: int, position: int) -> range | list[int]:
        home = sequence * self.home_cells
        begin = home + position % self.home_cells
        if begin + count <= home + self.home_cells:
            if not np.count_nonzero(self.n_owners[begin : begin + count]):
                return range(begin, begin + count)
        elif count <= self.home_cells:
            places = home + np.arange(position, position + count) % self.home_cells
            if not np.count_nonzero(self.n_owners[places]):
                return _listed(places)
        if self.lengths[sequence]:
            begin = self.ends[sequence]
        at_home = home + np.flatnonzero(self.n_owners[home : home + self.home_cells] == 0)
        if len(at_home) >= count:
            return _listed(at_home[:count])
        free = np.flatnonzero(self.n_owners == 0)
        if len(free) < count:
            raise CacheFull(count, len(free))
        # All of the own home; then whatever lies nearest.
        is_own = (free >= home) & (free < home + self.home_cells)
        distance = np.where(is_own, -1, np.abs(free - begin))
        order = np.argsort(distance, kind="stable")
        return _listed(np.sort(free[order[:count]]))

    def range_ahead(self, sequence: int, first: int, positions: npt.NDArray[np.int32]) -> tuple[int, int] | None:
        """As range_from would be after these positions, too, if nobody else takes their cells; None if they do not fit."""
        try:
            chosen = self._choose(sequence, len(positions), int(positions[0]))
        except CacheFull:
            return None
        low, high = _bounds(chosen)
        if not self.lengths[sequence]:
            return low, high
        begin, end = self.range_from(sequence, first)
        return min(begin, low), max(end, high)

    def remove(self, sequence: int, begin: int, end: int) -> None:
        """The sequence gives up the positions in [begin, end); a cell that nobody sees any more is free."""
        self._give_up(sequence, self._mine(sequence, begin, end))
        self._measure(sequence, self.begins[sequence], self.ends[sequence])

    def _give_up(self, sequence: int, gone: npt.NDArray[np.int64]) -> None:
        self.members[sequence, gone] = False
        self.n_owners[gone] -= 1
        freed = gone[self.n_owners[gone] == 0]
        self.positions[freed] = FREE
        self.n_free += len(freed)

    def share(self, target: int, cells: npt.NDArray[np.int64]) -> None:
        """The target sees these cells of another sequence too."""
        self.n_owners[cells] += ~self.members[target, cells]
        self.members[target, cells] = True
        self._measure(target, 0, self.n_cells)

    def unite(self, source: int, target: int, length: int) -> None:
        """The target's cells of positions [0, length) are the source's from now on; its own are free if nobody else's.

        Both must hold all of these positions.
        """
        own, others = self.cells_of(target, 0, length), self.cells_of(source, 0, length)
        assert len(own) == len(others) == length, f"sequences {source} and {target} do not both hold {length} positions"
        differ = own != others
        if differ.any():
            self._give_up(target, own[differ])
            self.share(target, others[differ])

    def n_only(self, sequences: Collection[int], kept_by: int = -1, n_kept: int = 0) -> int:
        """Used cells that belong to none but these sequences, less those of the first *n_kept* positions of one of them."""
        if not sequences:
            return 0
        owned = self.members[list(sequences)].sum(axis=0, dtype=np.int16)
        only = (owned > 0) & (owned == self.n_owners)
        if n_kept:
            only &= ~(self.members[kept_by] & (self.positions < n_kept))
        return int(np.count_nonzero(only))

    def shift(self, sequence: int, begin: int, delta: int) -> None:
        """Positions from *begin* on change by delta. The cells must not be shared."""
        self.positions[self._mine(sequence, begin, END)] += delta
        self._measure(sequence, self.begins[sequence], self.ends[sequence])

    def is_shared(self, sequence: int, begin: int) -> bool:
        """Whether any cell at position *begin* or later belongs to another sequence too."""
        return bool((self.n_owners[self._mine(sequence, begin, END)] > 1).any())

    def cells_of(self, sequence: int, begin: int, end: int) -> npt.NDArray[np.int64]:
        """The cells of positions [begin, end), in the order of the positions."""
        found = self._mine(sequence, begin, end)
        return found[np.argsort(self.positions[found], kind="stable")]

    def range_from(self, sequence: int, position: int) -> tuple[int, int]:
        """The tightest [begin, end) that holds the sequence's cells at this position and later ones."""
        if position <= self.firsts[sequence]:
            return self.begins[sequence], self.ends[sequence]
        low, high = self.begins[sequence], self.ends[sequence]
        found = self.members[sequence, low:high] & (self.positions[low:high] >= position)
        return low + int(found.argmax()), high - int(found[::-1].argmax())

    def _mine(self, sequence: int, begin: int, end: int) -> npt.NDArray[np.int64]:
        """The cells of positions [begin, end), in the order of the cells."""
        low, high = self.begins[sequence], self.ends[sequence]
        positions = self.positions[low:high]
        return low + np.flatnonzero(self.members[sequence, low:high] & (positions >= begin) & (positions < end))

    def _measure(self, sequence: int, low: int, high: int) -> None:
        """Take the bounds again, of a sequence whose cells all lie in [low, high)."""
        mine = low + np.flatnonzero(self.members[sequence, low:high])
        positions = self.positions[mine]
        self.lengths[sequence] = len(mine)
        self.begins[sequence] = int(mine[0]) if len(mine) else 0
        self.ends[sequence] = int(mine[-1]) + 1 if len(mine) else 0
        self.firsts[sequence] = int(positions.min()) if len(mine) else 0
        self.nexts[sequence] = int(positions.max()) + 1 if len(mine) else 0

    def check_integrity(self) -> None:
        """Raise AssertionError when the arrays contradict each other: a bug here, never the caller's fault."""
        assert self.n_free == np.count_nonzero(self.n_owners == 0), "the count of free cells is wrong"
        assert (self.members.sum(axis=0) == self.n_owners).all(), "owner counts differ from the members"
        assert ((self.positions == FREE) == (self.n_owners == 0)).all(), "a free cell has a position, or a used one none"
        for sequence in range(self.max_sequences):
            mine = np.flatnonzero(self.members[sequence])
            assert self.lengths[sequence] == len(mine), f"length of sequence {sequence}"
            if len(mine):
                assert self.begins[sequence] == mine[0], f"begin of sequence {sequence}"
                assert self.ends[sequence] == mine[-1] + 1, f"end of sequence {sequence}"
                positions = self.positions[mine]
                assert len(np.unique(positions)) == len(mine), f"sequence {sequence} has a position twice"
                assert self.firsts[sequence] == positions.min(), f"first position of sequence {sequence}"
                assert self.nexts[sequence] == positions.max() + 1, f"last position of sequence {sequence}"


def _bounds(cells: range | list[int]) -> tuple[int, int]:
    """The tightest [begin, end) that holds them."""
    return (cells.start, cells.stop) if isinstance(cells, range) else (min(cells), max(cells) + 1)


def _listed(cells: npt.NDArray[np.int64]) -> list[int]:
    return cells.tolist()  # type: ignore[no-any-return]


def padded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
