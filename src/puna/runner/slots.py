"""Which sequence of the cache a request gets, and how much of its prompt is already there.

There are more sequences than requests that run at once: the others keep what earlier requests computed. A prefix that
any sequence holds, of a request that runs or has ended, is not computed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from puna.kvcache.cache import Sequences, resume_point
from puna.runner.groups import Group, whole
from puna.runner.prefixes import PrefixTree

# Copying rows costs little, but not nothing: a prefix this much longer than the slot's own is worth it.
MIN_COPY_GAIN = 32


@dataclass
class Slot:
    """The cache holds the first *length* of these tokens; a running request computes the rest, and adds to the same list."""

    sequence: int
    tokens: list[int] = field(default_factory=list)
    length: int = 0
    is_busy: bool = False
    last_used: int = 0


class Slots:
    def __init__(self, cache: Sequences, n_parallel: int, n_sequences: int) -> None:
        self._cache = cache
        self._n_parallel = n_parallel
        self.slots = [Slot(i) for i in range(n_sequences)]
        self._prefixes = PrefixTree(n_sequences)  # of the slots' tokens, those that are still to be computed as well
        self._clock = 0

    @property
    def n_free(self) -> int:
        """Requests that may be admitted."""
        return self._n_parallel - sum(s.is_busy for s in self.slots)

    def cached(self, tokens: list[int]) -> int:
        """How many of a prompt's first tokens some sequence holds."""
        most = 0
        for shared, sequences in self._prefixes.along(tokens):
            for sequence in sequences:
                if shared <= most:
                    return most
                most = max(most, self._reusable(sequence, shared))
        return most

    def promised(self, tokens: list[int], at_least: int) -> Iterator[tuple[int, int]]:
        """Sequences that hold so many of a prompt's first tokens, or will once their own are computed; and how many."""
        for shared, sequences in self._prefixes.along(tokens):
            if shared < at_least:
                return
            for sequence in sequences:
                yield sequence, min(shared, self._prefixes.lengths[sequence])

    def _reusable(self, sequence: int, shared: int) -> int:
        """How many tokens a slot spares a prompt that shares so many: what it holds of them and has not forgotten."""
        held = min(shared, self.slots[sequence].length)
        return resume_point(self._cache, sequence, held) if held else 0

    def acquire(self, tokens: list[int], groups: Sequence[Group] = ()) -> tuple[int, int]:
        """A sequence for a prompt, and how many of its tokens are in the cache there: at most all but the last.

        The slot that holds most of the prompt is taken over if it is idle and loses little by it. Otherwise the one
        unused for longest is, and what another slot holds of the prompt, busy or not, is copied into it. Of each of the
        groups all tokens are there or none.
        """
        self._clock += 1
        idle = [s for s in self.slots if not s.is_busy]
        shared = [self._reusable(s, n) for s, n in enumerate(self._prefixes.shared(tokens))]
        donor = max(self.slots, key=lambda s: shared[s.sequence])
        best = max(idle, key=lambda s: (shared[s.sequence], -s.last_used))
        length = shared[best.sequence]
        others = [s for s in idle if s is not donor]
        loses_much = best is donor and length >= MIN_COPY_GAIN and 2 * length < best.length
        if others and (loses_much or shared[donor.sequence] >= length + MIN_COPY_GAIN):
            best, length = min(others, key=lambda s: s.last_used), shared[donor.sequence]
            self._cache.copy_prefix(donor.sequence, best.sequence, length)
        length = resume_point(self._cache, best.sequence, whole(0, min(length, len(tokens) - 1), 0, groups))
        self._cache.remove(best.sequence, length)
        self.replace(best.sequence, tokens, length)
        best.is_busy = True
        best.last_used = self._clock
        return best.sequence, length

    def record(self, sequence: int, tokens: list[int], length: int) -> None:
        """The cache holds the first *length* of these tokens in the sequence now, and nothing else.

        The list that was recorded last may only have grown. Costs as good as nothing then.
        """
        slot = self.slots[sequence]
        if slot.tokens is tokens:
            self._prefixes.extend(sequence, length)
            slot.length = length
        else:
            self.replace(sequence, tokens, length)

    def replace(self, sequence: int, tokens: list[int], length: int) -> None:
        """As ``record``, for another list or one that was changed. Who changes it says so before anything else is asked."""
        self._prefixes.put(sequence, tokens, len(tokens))
        slot = self.slots[sequence]
        slot.tokens, slot.length = tokens, length

    def release(self, sequence: int) -> None:
        self._clock += 1
        self.slots[sequence].is_busy = False
        self.slots[sequence].last_used = self._clock

    def evict(self) -> bool:
        """Forget the idle prefix unused for longest; False when there is none."""
        idle = [s for s in self.slots if not s.is_busy and s.length]
        if not idle:
            return False
        self.empty(min(idle, key=lambda s: s.last_used).sequence)
        return True

    def empty(self, sequence: int) -> None:
        self._cache.remove(sequence, 0)
        self.replace(sequence, [], 0)

    def start_afresh(self) -> None:
        """Nobody runs and nothing is held, whatever was in the books."""
        self._prefixes = PrefixTree(len(self.slots))
        for slot in self.slots:
            self._cache.remove(slot.sequence, 0)
            slot.tokens, slot.length, slot.is_busy = [], 0, False

    def check_integrity(self) -> None:
        """Raise AssertionError when the books contradict each other: a list was changed and nobody said so, for example."""
        self._prefixes.check_integrity()
        for slot in self.slots:
            n_known = self._prefixes.lengths[slot.sequence]
            n_shared = self._prefixes.shared(slot.tokens)[slot.sequence]
            assert slot.length <= n_known == n_shared, f"of slot {slot}, {n_known} tokens are known and {n_shared} are found"
