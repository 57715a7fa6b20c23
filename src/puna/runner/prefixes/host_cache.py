"""Prefixes that lost their place in the cache: copies in the host's memory, up to a bound, until a prompt begins like one.

Here is what is kept and what is thrown away for it; when something is put here and when it is brought back, is for
puna.runner.prefixes.slots to decide.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from puna import host
from puna.kvcache.cache import Saved, SavingCache, resume_point
from puna.runner.prefixes.tree import PrefixTree

log = logging.getLogger(__name__)

# Fewer tokens than this are not worth a copy, nor worth keeping one.
MIN_LOST = 64

# The largest entry is this part of the bound: else a single long prompt would throw all others away.
MAX_SHARE = 4

# Entries at most, however small they are.
MAX_ENTRIES = 1024

# This part of the machine's memory, or of the control group's, stays free: what was promised to models is not all taken yet.
FREE_SHARE = 16

# What a token takes besides its rows: a number, and its place in a list.
TOKEN_BYTES = 40


@dataclass(frozen=True, eq=False)
class Entry:
    number: int  # of its list in the tree
    tokens: list[int]
    saved: Saved
    n_bytes: int


def spare_bytes() -> int:
    """How much more may be taken; below 0 where some should be given back."""
    memory = host.memory()
    return memory.free - memory.total // FREE_SHARE


class HostCache:
    """Entries unused for longest go first, and those that a new one stands for."""

    def __init__(self, cache: SavingCache, max_bytes: int, spare: Callable[[], int] = spare_bytes) -> None:
        self.max_bytes = max_bytes
        self._spare = spare
        self.n_bytes = 0
        self._cache = cache
        self._entries: dict[int, Entry] = {}  # by number; those used last stand last
        self._free = list(range(MAX_ENTRIES - 1, -1, -1))
        self._prefixes = PrefixTree(MAX_ENTRIES)

    @property
    def n_entries(self) -> int:
        return len(self._entries)

    def entries(self) -> list[Entry]:
        """Those used last stand last; any thread."""
        return list(self._entries.values())

    def find(self, tokens: list[int]) -> tuple[Entry | None, int]:
        """The entry that spares a prompt most of its tokens, and how many."""
        best, most = None, 0
        for shared, numbers in self._prefixes.along(tokens):
            if shared <= most:
                break
            for number in numbers:
                entry = self._entries[number]
                point = entry.saved.resume_point(min(shared, len(entry.tokens)))
                if point > most:
                    best, most = entry, point
        return best, most

    def store(self, sequence: int, tokens: list[int]) -> bool:
        """Copy what a sequence holds, which are these tokens; the list must not be changed any more.

        Where that takes too much, without what windows have forgotten. False, and nothing is kept, where that does as well
        or there is no memory.
        """
        most = self.max_bytes // MAX_SHARE - TOKEN_BYTES * len(tokens)
        is_lean = self._cache.saved_bytes(sequence) > most
        n_bytes = self._cache.saved_bytes(sequence, lean=is_lean)
        if n_bytes == 0 or n_bytes > most:
            return False
        n_bytes += TOKEN_BYTES * len(tokens)
        bound = min(self.max_bytes, self.n_bytes + self._spare())
        for entry in () if is_lean else self._covered(sequence, tokens):
            self.drop(entry)
        while self._entries and (self.n_bytes + n_bytes > bound or not self._free):
            self.drop(next(iter(self._entries.values())))
        if n_bytes > bound:
            return False
        try:
            saved = self._cache.save(sequence, lean=is_lean)
        except MemoryError:
            log.warning("no memory to keep %d computed tokens (%.0f MB)", len(tokens), n_bytes / 1e6)
            return False
        entry = Entry(self._free.pop(), tokens, saved, n_bytes)
        self._entries[entry.number] = entry
        self._prefixes.put(entry.number, tokens, len(tokens))
        self.n_bytes += n_bytes
        return True

    def _covered(self, sequence: int, tokens: list[int]) -> list[Entry]:
        """Entries that spare no prompt more than this sequence would."""
        found = []
        for shared, numbers in self._prefixes.along(tokens):
            for entry in (self._entries[number] for number in numbers):
                n_tokens = len(entry.tokens)
                if n_tokens <= shared and resume_point(self._cache, sequence, n_tokens) == n_tokens:
                    found.append(entry)
        return found

    def use(self, entry: Entry) -> None:
        """It goes last: what is kept next does not throw it away, since two of the largest fit beside each other."""
        if self._entries.get(entry.number) is entry:
            self._entries[entry.number] = self._entries.pop(entry.number)

    def restore(self, entry: Entry, sequence: int, length: int) -> None:
        """The sequence, which is empty, holds the first *length* tokens of an entry, which goes if that is nearly all.

        It may have gone before, for one that was kept since it was found.

        Errors: CacheFull; then nothing has changed.
        """
        self._cache.restore(sequence, entry.saved, length)
        if len(entry.tokens) - length < MIN_LOST and self._entries.get(entry.number) is entry:
            self.drop(entry)

    def drop(self, entry: Entry) -> None:
        del self._entries[entry.number]
        self._prefixes.remove(entry.number)
        self._free.append(entry.number)
        self.n_bytes -= entry.n_bytes

    def clear(self) -> None:
        for entry in self.entries():
            self.drop(entry)

    def check_integrity(self) -> None:
        """Raise AssertionError when the books contradict each other."""
        self._prefixes.check_integrity()
        assert self.n_bytes == sum(entry.n_bytes for entry in self._entries.values()) <= self.max_bytes
        assert sorted([*self._entries, *self._free]) == list(range(MAX_ENTRIES)), "a number is lost, or used twice"
        for number in range(MAX_ENTRIES):
            n_known = self._prefixes.lengths[number]
            entry = self._entries.get(number)
            assert n_known == (len(entry.tokens) if entry else 0), f"of entry {number}, {n_known} tokens are known"
            assert entry is None or entry.saved.n_bytes <= entry.n_bytes
