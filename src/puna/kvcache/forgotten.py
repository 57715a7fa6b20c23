"""What windows have forgotten of prompts: kept in the host's memory, up to a bound, so that a sequence can go back there.

A window's cache holds what the next row sees. A prompt that departs from an earlier one further back needs what rows saw there;
it comes back from here. Bookkeeping and bytes only; which rows are worth it and where they go, puna.kvcache.causal decides.
Sequences share what they have in common. What was not used for longest goes first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from puna.kvcache.rows import Bytes, Indices
from puna.kvcache.span import Span

log = logging.getLogger(__name__)

# How much the machine has to spare is asked anew when so much was added, since asking takes longer than keeping a few rows.
GRANTED_BYTES = 16 << 20


@dataclass(frozen=True, eq=False)
class Stretch:
    """Rows of the positions [begin, end). Never changed."""

    begin: int
    end: int
    places: Indices  # of the row of each position, in the home of its sequence; it goes back to the same
    rows: list[Bytes]  # of each pool
    n_bytes: int  # of the memory that they lie in

    def until(self, position: int) -> Stretch:
        """The rows before this position, in the same memory."""
        n, n_all = position - self.begin, self.end - self.begin
        return replace(self, end=position, places=self.places[:n], rows=[rows[: len(rows) // n_all * n] for rows in self.rows])

    def part(self, begin: int, end: int) -> Indices:
        """Which of the rows are of positions in [begin, end)."""
        first = max(begin, self.begin) - self.begin
        return np.arange(first, max(min(end, self.end) - self.begin, first))


def held_from(position: int, live: int, stretches: Sequence[Stretch]) -> int:
    """The first of the positions that are held without a gap up to this one, in stretches and from *live* on."""
    at = min(position, live)
    for stretch in reversed(stretches):
        if stretch.end < at:
            break
        at = min(at, stretch.begin)
    return at


def resume_point(position: int, live: int, stretches: Sequence[Stretch], span: Span) -> int:
    """The furthest position up to this one where a row finds all it sees, in stretches and from *live* on; 0 at least."""
    while position > 0 and held_from(position, live, stretches) > span.needed_from(position):
        # Further back within the same rows more of them would be missing, if anything: the next are those before the gap.
        gap = held_from(position, live, stretches)
        position = max((s.end for s in stretches if s.end < gap), default=0)
    return max(position, 0)


class Forgotten:
    def __init__(self, max_sequences: int) -> None:
        self.n_bytes = 0
        self.max_bytes = 0
        self._granted_bytes = 0
        self._spare: Callable[[], int] = lambda: 0
        self._of: list[list[Stretch]] = [[] for _ in range(max_sequences)]  # in the order of positions, which do not overlap
        self._users: dict[Stretch, set[int]] = {}  # those used last stand last

    def allow(self, max_bytes: int, spare: Callable[[], int]) -> None:
        """Keep so many bytes, as long as the machine has more to spare than it says."""
        self.max_bytes, self._spare, self._granted_bytes = max_bytes, spare, 0

    def of(self, sequence: int) -> Sequence[Stretch]:
        return self._of[sequence]

    def keep(self, sequence: int, begin: int, end: int, read: Callable[[int, int], Stretch]) -> None:
        """Keep what lies in [begin, end) and is not kept yet, if there is room; it comes after all that is kept."""
        begin = max(begin, self._of[sequence][-1].end if self._of[sequence] else 0)
        if begin >= end or not self.max_bytes:
            return
        try:
            stretch = read(begin, end)
        except MemoryError:
            log.warning("no memory to keep %d forgotten positions", end - begin)
            return
        self.adopt(sequence, [stretch])

    def adopt(self, sequence: int, stretches: Iterable[Stretch]) -> None:
        """The sequence has these as well, which come after all that it has."""
        for stretch in stretches:
            self._of[sequence].append(stretch)
            if stretch not in self._users:
                self.n_bytes += stretch.n_bytes
            self._users.setdefault(stretch, set()).add(sequence)
        self.use(sequence)
        if self.n_bytes > self._granted_bytes:
            self._granted_bytes = min(self.max_bytes, self.n_bytes + min(self._spare(), GRANTED_BYTES))
        while self._users and self.n_bytes > self._granted_bytes:
            self._drop(next(iter(self._users)))

    def use(self, sequence: int) -> None:
        """What the sequence has goes last."""
        for stretch in self._of[sequence]:
            self._users[stretch] = self._users.pop(stretch)

    def share(self, source: int, target: int, position: int) -> None:
        """The target, which has nothing, has what the source has before this position."""
        self.adopt(target, before(self._of[source], position))

    def cut(self, sequence: int, position: int) -> None:
        """The sequence has nothing from this position on."""
        stretches = self._of[sequence]
        while stretches and stretches[-1].end > position:
            last = stretches.pop()
            self._leave(last, sequence)
            self.adopt(sequence, before([last], position))

    def _leave(self, stretch: Stretch, sequence: int) -> None:
        users = self._users[stretch]
        users.discard(sequence)
        if not users:
            del self._users[stretch]
            self.n_bytes -= stretch.n_bytes

    def _drop(self, stretch: Stretch) -> None:
        for sequence in list(self._users[stretch]):
            self._of[sequence].remove(stretch)
            self._leave(stretch, sequence)

    def check_integrity(self) -> None:
        """Raise AssertionError when the books contradict each other."""
        users: dict[Stretch, set[int]] = {}
        for sequence, stretches in enumerate(self._of):
            for one, other in pairwise(stretches):
                assert one.end <= other.begin, f"what sequence {sequence} has forgotten overlaps"
            for stretch in stretches:
                assert 0 <= stretch.begin < stretch.end == stretch.begin + len(stretch.places)
                users.setdefault(stretch, set()).add(sequence)
        assert users == self._users, "a stretch is of others than those who have it"
        assert self.n_bytes == sum(stretch.n_bytes for stretch in users)
        assert self.n_bytes <= self.max_bytes


def before(stretches: Sequence[Stretch], position: int) -> list[Stretch]:
    """Those before this position, and of the one that it lies in the beginning."""
    return [s if s.end <= position else s.until(position) for s in stretches if s.begin < position]
