"""Which sequence of the cache a request gets, and how much of its prompt is already there.

There are more sequences than requests that run at once: the others keep what earlier requests computed. A prefix that
any sequence holds, of a request that runs or has ended, is not computed again. It is copied while there is room for that
beside what running requests may still need, and shared where it lies when there is not. What loses its place in the cache
goes to the host cache, if there is one, and comes back when a prompt begins with it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set

from puna.kvcache.cache import Sequences, resume_point
from puna.kvcache.cells import CacheFull
from puna.runner.prefixes.groups import Group, whole
from puna.runner.prefixes.held import HeldPrefixes, Slot
from puna.runner.prefixes.host_cache import MIN_LOST, Entry, HostCache

# Copying rows costs little, but not nothing: a prefix this much longer than the slot's own is worth it. What a chat's
# template begins all prompts with is.
MIN_COPY_GAIN = 8

# Copying from the host cache takes longer, and another prefix may have to go there for it.
MIN_RESTORE_GAIN = 32

# A sequence that gives up its last tokens gives up this many at once, so that it need not do so at every step.
SHRUNK_AT_ONCE = 32

# What is put into the host cache is copied as a whole, for the sake of the tokens that would be lost: one in so many at least.
MAX_STORED_PER_LOST = 16


class Slots(HeldPrefixes):
    """Decides who gets which slot, what is copied, shared, evicted, offloaded and restored."""

    def __init__(self, cache: Sequences, n_parallel: int, n_sequences: int, host_cache: HostCache | None = None) -> None:
        super().__init__(cache, n_parallel, n_sequences)
        self.host_cache = host_cache
        self._deduplicated_at = -1  # on the clock: copies were sought in vain, or there are none left

    def cached(self, tokens: list[int]) -> int:
        """How many of a prompt's first tokens some sequence holds, or the host cache where that would be brought back."""
        most, _ = self._most_held(tokens)
        spared = self.host_cache.find(tokens)[1] if self.host_cache else 0
        return spared if spared >= most + MIN_RESTORE_GAIN else most

    def acquire(self, tokens: list[int], groups: Sequence[Group] = (), n_needed: int = 0) -> tuple[int, int]:
        """A sequence for a prompt, and how many of its tokens are in the cache there: at most all but the last.

        Of each of the groups all tokens are there or none. *n_needed* is the room that is still needed beside the prompt's,
        for its answer and by those that run; what lies in another sequence is copied only beside that.
        """
        self._clock += 1
        slot, length = self._from_host_cache(tokens, groups) or self._take(tokens, groups, n_needed)
        length = self._resumable(slot, length, tokens, groups)
        self._cache.remove(slot.sequence, length)
        self.replace(slot.sequence, tokens, length)
        slot.is_busy = True
        slot.last_used = self._clock
        return slot.sequence, length

    def _take(self, tokens: list[int], groups: Sequence[Group], n_needed: int) -> tuple[Slot, int]:
        """A slot that holds a part of the prompt, and how much.

        The slot that holds most of the prompt is taken over if it is idle and loses less than half by it. Otherwise an
        empty one is or the one unused for longest, and what another slot holds of the prompt, busy or not, is copied into it.
        """
        idle = self._idle()
        shared = [self._reusable(s, n) for s, n in enumerate(self._prefixes.shared(tokens))]
        most = max(shared)
        best = max(idle, key=lambda s: shared[s.sequence])
        if 2 * shared[best.sequence] < best.length or most >= shared[best.sequence] + MIN_COPY_GAIN:
            best = idle[0]
            if len(idle) > 1 and most >= MIN_COPY_GAIN and shared.count(most) == 1 and shared[best.sequence] == most:
                best = idle[1]  # nobody else could give what is about to be lost
        length = shared[best.sequence]
        if most >= length + MIN_COPY_GAIN:
            donor = self.slots[shared.index(most)]
            self._offload(best, 0)
            self._copy(donor.sequence, best, most, n_needed + len(tokens) - most)
            return best, most
        self._offload(best, self._resumable(best, length, tokens, groups))
        return best, length

    def _copy(self, source: int, slot: Slot, length: int, n_needed: int) -> None:
        """What the slot held goes; it gets the source's first *length* tokens, as rows of its own if there is room for them."""
        self.empty(slot.sequence)
        n_room = self._cache.n_free
        if n_room < length + n_needed:
            n_room += self._cache.n_freed(self._idle_sequences())
        has_room = self._cache.n_free >= length and n_room >= length + n_needed
        self._cache.copy_prefix(source, slot.sequence, length, by_reference=not has_room)

    def share(self, tokens: list[int]) -> tuple[int, int]:
        """How many of a prompt's first tokens it would not take room for, and the sequence that holds them, or -1."""
        most, holder = self._most_held(tokens)
        if self.host_cache and self.host_cache.find(tokens)[1] >= most + MIN_RESTORE_GAIN:
            return 0, -1  # what comes back from there takes room
        return most, holder

    def regain(self, sequence: int, tokens: list[int], groups: Sequence[Group] = (), n_needed: int = 0) -> int:
        """Of a request that gave way: how many of its computed tokens it still has, or finds in others or in the host cache."""
        self._clock += 1
        slot = self.slots[sequence]
        length = slot.length
        most, holder = self._most_held(tokens, but=sequence)
        entry, spared = self.host_cache.find(tokens) if self.host_cache else (None, 0)
        if entry is not None and spared >= max(length, most) + MIN_RESTORE_GAIN:
            n_back = entry.saved.resume_point(whole(0, min(spared, len(tokens) - 1), 0, groups))
            length = self._restore(slot, entry, n_back) or slot.length
        elif most >= length + MIN_COPY_GAIN:
            self._copy(holder, slot, most, n_needed + len(tokens) - most)
            length = most
        length = self._resumable(slot, length, tokens, groups)
        self._cache.remove(sequence, length)
        self.replace(sequence, tokens, length)
        return length

    def _resumable(self, slot: Slot, length: int, tokens: list[int], groups: Sequence[Group]) -> int:
        """Of the first *length* tokens of a prompt, as many as the slot can go on from: never the last, and whole groups."""
        return resume_point(self._cache, slot.sequence, whole(0, min(length, len(tokens) - 1), 0, groups))

    def _from_host_cache(self, tokens: list[int], groups: Sequence[Group]) -> tuple[Slot, int] | None:
        """A slot with what the host cache has of the prompt, and how much; None where it does not pay or finds no room."""
        entry, spared = self.host_cache.find(tokens) if self.host_cache else (None, 0)
        if self.host_cache is None or entry is None:
            return None
        length = entry.saved.resume_point(whole(0, min(spared, len(tokens) - 1), 0, groups))
        most, holder = self._most_held(tokens)
        if length < most + MIN_RESTORE_GAIN:
            return None
        idle = self._idle()
        slot = next((s for s in idle if s.sequence != holder), idle[0])
        return (slot, length) if self._restore(slot, entry, length) else None

    def _restore(self, slot: Slot, entry: Entry, length: int) -> int:
        """Put an entry's first *length* tokens into a slot; 0 where that finds no room.

        As for tokens that are computed, idle prefixes give way.
        """
        assert self.host_cache is not None
        giving = {*self._idle_sequences(), slot.sequence}
        if self._cache.n_free + self._cache.n_freed(giving) < length:
            return 0
        self.host_cache.use(entry)
        if not slot.is_busy:
            self._offload(slot, 0)
        self.empty(slot.sequence)
        while self._cache.n_free < length and self.evict():
            pass
        try:
            self.host_cache.restore(entry, slot.sequence, length)
        except CacheFull:
            return 0
        return length

    def offload(self, sequence: int) -> None:
        """Before a request gives way: what it has computed goes to the host cache, if that is worth it; it stays here as well."""
        self._offload(self.slots[sequence], 0)

    def shrink(self, sequence: int, n_short: int) -> int:
        """Give up the last tokens of a sequence for the sake of so many that lack room; how many are left."""
        slot = self.slots[sequence]
        length = resume_point(self._cache, sequence, max(slot.length - max(n_short, SHRUNK_AT_ONCE), 0))
        self._cache.remove(sequence, length)
        slot.length = length
        return length

    def deduplicate(self, *, also_busy: bool) -> None:
        """Where sequences hold copies of the same tokens, leave one, which all of them read.

        Those that run read more slowly then, so only idle ones give up copies unless *also_busy*.
        """
        if also_busy and self._deduplicated_at == self._clock:
            return
        for slot in sorted(self.slots, key=_rank):
            if slot.length and (also_busy or not slot.is_busy):
                self._deduplicate(slot)
        if also_busy:
            self._deduplicated_at = self._clock

    def _deduplicate(self, slot: Slot) -> None:
        """With the sequence that shares most of what the slot holds, of those of a lower rank."""
        most, holder = 0, -1
        for shared, sequences in self._prefixes.along(slot.tokens[: slot.length]):
            for other in (self.slots[s] for s in sequences):
                n = min(shared, other.length)
                if n > most and _rank(other) < _rank(slot):
                    most, holder = n, other.sequence
        if most >= MIN_COPY_GAIN:
            self._cache.share_prefix(holder, slot.sequence, most)

    def _offload(self, slot: Slot, kept: int) -> None:
        """Before a slot loses all but its first *kept* tokens: if nobody else holds the others, all goes to the host cache."""
        if self.host_cache is None or slot.length - kept < MIN_LOST:
            return
        tokens = slot.tokens[: min(slot.length, self._cache.length(slot.sequence))]
        n_elsewhere, _ = self._most_held(tokens, but=slot.sequence)
        _, n_spared = self.host_cache.find(tokens)
        n_lost = len(tokens) - max(kept, n_elsewhere, n_spared)
        if n_lost >= MIN_LOST and len(tokens) <= MAX_STORED_PER_LOST * n_lost:
            self.host_cache.store(slot.sequence, tokens)

    def evict(self, spared: Set[int] = frozenset()) -> bool:
        """The idle prefix unused for longest leaves the cache, of those that make room by it; False when there is none.

        The *spared* go last.
        """
        idle = sorted((s for s in self.slots if not s.is_busy and s.length), key=lambda s: (s.sequence in spared, s.last_used))
        slot = next((s for s in idle if self._makes_room(s, idle)), None)
        if slot is None:
            return False
        self._offload(slot, 0)
        self.empty(slot.sequence)
        return True

    def _makes_room(self, slot: Slot, idle: Collection[Slot]) -> bool:
        """Whether the slot holds what no running request needs: alone, or with idle ones that would give it up next."""
        if not self._cache.n_cells:
            return True
        others = [s.sequence for s in idle if s is not slot]
        return self._cache.n_freed([*others, slot.sequence]) > self._cache.n_freed(others)

    def start_afresh(self) -> None:
        if self.host_cache:
            self.host_cache.clear()
        super().start_afresh()

    def check_integrity(self) -> None:
        super().check_integrity()
        if self.host_cache:
            self.host_cache.check_integrity()


def _rank(slot: Slot) -> tuple[bool, int, int]:
    """Who keeps rows that several slots have: one that runs, or that one which has been there for longest."""
    return not slot.is_busy, slot.last_used, slot.sequence
