"""Which sequence of the cache a request gets, and how much of its prompt is already there.

There are more sequences than requests that run at once: the others keep what earlier requests computed. A prefix that
any sequence holds, of a request that runs or has ended, is not computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from puna.kvcache.cache import Sequences, resume_point

# Copying rows costs little, but not nothing: a prefix this much longer than the slot's own is worth it.
MIN_COPY_GAIN = 32


@dataclass
class Slot:
    """The cache holds the first *length* of these tokens; a running request goes on extending the same list."""

    sequence: int
    tokens: list[int] = field(default_factory=list)
    length: int = 0
    is_busy: bool = False
    last_used: int = 0

    def shared_with(self, tokens: list[int]) -> int:
        return common_prefix(self.tokens, tokens, min(self.length, len(tokens)))


class Slots:
    def __init__(self, cache: Sequences, n_parallel: int, n_sequences: int) -> None:
        self._cache = cache
        self._n_parallel = n_parallel
        self.slots = [Slot(i) for i in range(n_sequences)]
        self._clock = 0

    @property
    def n_free(self) -> int:
        """Requests that may be admitted."""
        return self._n_parallel - sum(s.is_busy for s in self.slots)

    def cached(self, tokens: list[int]) -> int:
        """How many of a prompt's first tokens some sequence holds."""
        return max(self._reusable(s, tokens) for s in self.slots)

    def _reusable(self, slot: Slot, tokens: list[int]) -> int:
        """How many of the prompt's tokens the slot spares: all that it shares, or less where it has forgotten them."""
        shared = slot.shared_with(tokens)
        return resume_point(self._cache, slot.sequence, shared) if shared else 0

    def acquire(self, tokens: list[int]) -> tuple[int, int]:
        """A sequence for a prompt, and how many of its tokens are in the cache there: at most all but the last.

        The slot that holds most of the prompt is taken over if it is idle and loses little by it. Otherwise the one
        unused for longest is, and what another slot holds of the prompt, busy or not, is copied into it.
        """
        self._clock += 1
        idle = [s for s in self.slots if not s.is_busy]
        shared = {s.sequence: self._reusable(s, tokens) for s in self.slots}
        donor = max(self.slots, key=lambda s: shared[s.sequence])
        best = max(idle, key=lambda s: (shared[s.sequence], -s.last_used))
        length = shared[best.sequence]
        others = [s for s in idle if s is not donor]
        loses_much = best is donor and length >= MIN_COPY_GAIN and 2 * length < best.length
        if others and (loses_much or shared[donor.sequence] >= length + MIN_COPY_GAIN):
            best, length = min(others, key=lambda s: s.last_used), shared[donor.sequence]
            self._cache.copy_prefix(donor.sequence, best.sequence, length)
        length = resume_point(self._cache, best.sequence, min(length, len(tokens) - 1))
        self._cache.remove(best.sequence, length)
        best.tokens, best.length = tokens, length
        best.is_busy = True
        best.last_used = self._clock
        return best.sequence, length

    def record(self, sequence: int, tokens: list[int], length: int) -> None:
        """The cache holds the first *length* of these tokens in the sequence now, and nothing else."""
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
        self.record(sequence, [], 0)


def common_prefix(a: Sequence[int], b: Sequence[int], limit: int) -> int:
    """Leading elements that are equal, at most *limit*; found by halving, since comparing slices is fast."""
    if a[:limit] == b[:limit]:
        return limit
    equal, differs = 0, limit
    while differs - equal > 1:
        middle = (equal + differs) // 2
        if a[equal:middle] == b[equal:middle]:
            equal = middle
        else:
            differs = middle
    return equal
