"""Which sequence of the cache a request gets, and how much of its prompt is already there.

Each slot remembers the tokens whose keys and values the cache still holds, also after its request has ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from puna.kvcache.cache import Cache

# Copying rows costs little, but not nothing: a prefix this much longer than the slot's own is worth it.
MIN_COPY_GAIN = 32


@dataclass
class Slot:
    sequence: int
    tokens: list[int] = field(default_factory=list)
    is_busy: bool = False
    last_used: int = 0


class Slots:
    def __init__(self, cache: Cache, count: int) -> None:
        self._cache = cache
        self.slots = [Slot(i) for i in range(count)]
        self._clock = 0

    @property
    def n_free(self) -> int:
        return sum(not s.is_busy for s in self.slots)

    def acquire(self, tokens: list[int]) -> tuple[int, int]:
        """A free slot for a prompt, and how many of its tokens are in the cache there: at most all but the last.

        The slot that holds most of the prompt is taken over if it is free and loses little by it. Otherwise the one
        unused for longest is, and what another slot holds of the prompt, busy or not, is copied into it.
        """
        self._clock += 1
        free = [s for s in self.slots if not s.is_busy]
        donor = max(self.slots, key=lambda s: common_prefix(s.tokens, tokens))
        best = max(free, key=lambda s: (common_prefix(s.tokens, tokens), -s.last_used))
        shared, length = common_prefix(donor.tokens, tokens), common_prefix(best.tokens, tokens)
        others = [s for s in free if s is not donor]
        loses_much = best is donor and shared >= MIN_COPY_GAIN and 2 * shared < len(donor.tokens)
        if others and (loses_much or shared >= length + MIN_COPY_GAIN):
            best, length = min(others, key=lambda s: s.last_used), shared
            self._cache.copy_prefix(donor.sequence, best.sequence, shared)
        length = min(length, len(tokens) - 1)
        if not self._cache.can_resume(best.sequence, length):
            length = 0
        self._cache.remove(best.sequence, length)
        best.tokens = tokens[:length]
        best.is_busy = True
        best.last_used = self._clock
        return best.sequence, length

    def record(self, sequence: int, tokens: list[int]) -> None:
        """These tokens, and no others, are in the cache of the sequence now."""
        self.slots[sequence].tokens = tokens

    def release(self, sequence: int) -> None:
        self._clock += 1
        self.slots[sequence].is_busy = False
        self.slots[sequence].last_used = self._clock


def common_prefix(a: list[int], b: list[int]) -> int:
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    return next(i for i in range(length) if a[i] != b[i])
