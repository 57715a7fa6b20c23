"""What libllama keeps of past tokens, as the runner asks for it.

libllama tells neither how much room is left nor which cells are shared, so the cells are counted here as well: what
happens to its memory happens to the books. All sequences share one pool; a prefix that is copied is shared, not moved.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import numpy.typing as npt

from puna.kvcache.batch import Batch, runs
from puna.kvcache.cache import UNLIMITED, Limits, NotSupported
from puna.kvcache.cells import END, CacheFull, Cells
from puna.native.decoder import Context

Opened = Callable[[], Context]


def their_positions(batch: Batch) -> npt.NDArray[np.int32]:
    """As libllama keeps them: where positions have axes, the first one's, which an image may not move along."""
    return batch.positions if batch.axes is None else np.ascontiguousarray(batch.axes[0])


class Positions:
    """libllama's position of each token of each sequence, for models whose positions have axes."""

    def __init__(self, max_sequences: int) -> None:
        self._of: list[list[int]] = [[] for _ in range(max_sequences)]

    def add(self, sequence: int, positions: npt.NDArray[np.int32]) -> None:
        self._of[sequence] += positions.tolist()

    def at(self, sequence: int, index: int) -> int:
        """Of the token at *index*; of the one that comes next, the first position that it could have."""
        known = self._of[sequence]
        return known[index] if index < len(known) else (known[-1] + 1 if known else 0)

    def splits(self, sequence: int, index: int) -> bool:
        """Whether tokens before and from *index* on have one position: those of an image."""
        known = self._of[sequence]
        return 0 < index < len(known) and known[index - 1] >= known[index]

    def cut(self, sequence: int, length: int) -> None:
        del self._of[sequence][length:]

    def copy(self, source: int, target: int, length: int) -> None:
        self._of[target] = self._of[source][:length]


class AttentionCache:
    """Keys and values of each token. *window*: the shortest of any layer, 0 when all see everything.

    A hybrid model has recurrent layers as well, whose state is that after the last token: such a sequence goes on only
    at its end or from the beginning.
    """

    def __init__(
        self,
        context: Opened,
        limits: Limits,
        n_cells: int,
        *,
        window: int,
        can_shift: bool,
        is_hybrid: bool,
        has_axes: bool = False,
    ) -> None:
        self._context = context
        self._cells = Cells(n_cells, limits.max_sequences)
        self._window = window
        self._can_shift = can_shift and not is_hybrid
        self.is_hybrid = is_hybrid
        self._positions = Positions(limits.max_sequences) if has_axes else None
        self.has_moved = False  # libllama has still to turn keys

    @property
    def n_cells(self) -> int:
        return self._cells.n_cells

    @property
    def n_free(self) -> int:
        return self._cells.n_free

    def n_freed(self, sequences: Collection[int], kept_by: int = -1, n_kept: int = 0) -> int:
        return self._cells.n_only(sequences, kept_by, n_kept)

    def length(self, sequence: int) -> int:
        return int(self._cells.nexts[sequence])

    def copy_prefix(self, source: int, target: int, length: int, *, by_reference: bool = False) -> None:
        if source == target:
            return
        self.remove(target, 0)
        length = min(length, self.length(source))
        if length and self.can_resume(source, length):
            # Some memories copy a sequence as a whole or end the process.
            self._context().share(source, target, -1 if length == self.length(source) else self._theirs(source, length))
            self._cells.share(target, self._cells.cells_of(source, 0, length))
            if self._positions:
                self._positions.copy(source, target, length)

    def share_prefix(self, source: int, target: int, length: int) -> None:
        """What was copied is shared already."""

    def can_resume(self, sequence: int, position: int) -> bool:
        length = self.length(sequence)
        if position <= 0 or position > length:
            return position == 0
        if self.is_hybrid:
            return position == length
        if self._positions and self._positions.splits(sequence, position):
            return False
        return not self._window or self._context().first(sequence) <= max(self._theirs(sequence, position) - self._window, 0)

    def _theirs(self, sequence: int, index: int) -> int:
        return self._positions.at(sequence, index) if self._positions else index

    def remove(self, sequence: int, begin: int, end: int | None = None, *, n_positions: int = 0) -> None:
        length = self.length(sequence)
        if end is not None and begin < end < length:
            self._remove_middle(sequence, begin, end)
        elif (end is None or begin < end) and begin < length:
            kept = begin if self.can_resume(sequence, begin) else 0
            if not self._context().remove(sequence, self._theirs(sequence, kept)):
                self._context().remove(sequence, kept := 0)  # of a whole sequence it is never refused
            self._cut(sequence, kept)

    def _cut(self, sequence: int, length: int) -> None:
        self._cells.remove(sequence, length, END)
        if self._positions:
            self._positions.cut(sequence, length)

    def _remove_middle(self, sequence: int, begin: int, end: int) -> None:
        # Cells that another sequence sees would move for it too. What a window has forgotten leaves a gap.
        if not self._can_shift or self._cells.is_shared(sequence, end) or self._context().first(sequence) > 0:
            raise NotSupported("cached positions cannot be moved: the tokens after a removed range are computed again")
        if not self._context().remove(sequence, begin, end):
            raise NotSupported("libllama cannot forget a part of this sequence")
        self._context().move(sequence, end, begin - end)
        self._cells.remove(sequence, begin, end)
        self._cells.shift(sequence, end, begin - end)
        self.has_moved = True

    # For the step.

    def check_room(self, batch: Batch) -> None:
        """Errors: CacheFull."""
        if batch.n_tokens > self.n_free:
            raise CacheFull(batch.n_tokens, self.n_free)

    def add(self, batch: Batch) -> None:
        """The batch has been computed."""
        theirs = their_positions(batch)
        for sequence, begin, end in runs(batch.sequences):
            self._place(sequence, batch.positions[begin:end], theirs[begin:end])
        self.has_moved = False

    def _place(self, sequence: int, positions: npt.NDArray[np.int32], theirs: npt.NDArray[np.int32]) -> None:
        if len(positions):
            self._cells.place(sequence, positions)
            if self._positions:
                self._positions.add(sequence, theirs)

    def recover(self, batch: Batch) -> None:
        """The batch broke off: of each sequence, libllama holds as much of it as it had finished."""
        if self.is_hybrid:
            self.forget_all()
            return
        theirs = their_positions(batch)
        for sequence, begin, end in runs(batch.sequences):
            n_finished = int((theirs[begin:end] <= self._context().last(sequence)).sum())
            self._place(sequence, batch.positions[begin : begin + n_finished], theirs[begin : begin + n_finished])

    def forget_all(self) -> None:
        self._context().clear()
        for sequence in range(self._cells.max_sequences):
            self._cut(sequence, 0)

    def check_integrity(self) -> None:
        self._cells.check_integrity()
        for sequence in range(self._cells.max_sequences):
            length = self.length(sequence)
            last = self._theirs(sequence, length - 1) if length else -1
            assert self._context().last(sequence) == last, f"sequence {sequence} is of another length"


class StateCache:
    """A recurrent model: of each sequence the state after its last token, and nothing else."""

    is_hybrid = False
    has_moved = False
    n_cells, n_free = 0, UNLIMITED

    def __init__(self, context: Opened, limits: Limits) -> None:
        self._context = context
        self._lengths = [0] * limits.max_sequences

    def length(self, sequence: int) -> int:
        return self._lengths[sequence]

    def n_freed(self, sequences: Collection[int], kept_by: int = -1, n_kept: int = 0) -> int:
        return 0

    def copy_prefix(self, source: int, target: int, length: int, *, by_reference: bool = False) -> None:
        if source == target:
            return
        self.remove(target, 0)
        if length and length == self.length(source):
            self._context().share(source, target, -1)
            self._lengths[target] = length

    def share_prefix(self, source: int, target: int, length: int) -> None:
        """States take no room of a pool."""

    def can_resume(self, sequence: int, position: int) -> bool:
        return position in (0, self.length(sequence))

    def remove(self, sequence: int, begin: int, end: int | None = None, *, n_positions: int = 0) -> None:
        length = self.length(sequence)
        if end is not None and begin < end < length:
            raise NotSupported("a recurrent state cannot forget tokens in the middle: what follows them is computed again")
        if (end is None or begin < end) and begin < length:
            self._context().remove(sequence, 0)
            self._lengths[sequence] = 0

    def check_room(self, batch: Batch) -> None:
        """There always is."""

    def add(self, batch: Batch) -> None:
        for sequence, begin, end in runs(batch.sequences):
            self._lengths[sequence] += end - begin

    def recover(self, batch: Batch) -> None:
        """A step may move the states of other sequences too, so none of them can be trusted."""
        self.forget_all()

    def forget_all(self) -> None:
        self._context().clear()
        self._lengths = [0] * len(self._lengths)

    def check_integrity(self) -> None:
        for sequence, length in enumerate(self._lengths):
            assert self._context().last(sequence) + 1 == length, f"sequence {sequence} is of another length"
