"""What each sequence of the cache holds, and for whom: books, no decisions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from puna.kvcache.cache import Sequences, resume_point
from puna.runner.prefixes.tree import Outline, PrefixTree


@dataclass
class Slot:
    """The cache holds the first *length* of these tokens; a running request computes the rest, and adds to the same list."""

    sequence: int
    tokens: list[int] = field(default_factory=list)
    length: int = 0
    is_busy: bool = False
    last_used: int = 0


class HeldPrefixes:
    """Slots, one for each sequence: those of requests that run, and those that keep what earlier ones computed."""

    def __init__(self, cache: Sequences, n_parallel: int, n_sequences: int) -> None:
        self.slots = [Slot(i) for i in range(n_sequences)]
        self._cache = cache
        self._n_parallel = n_parallel
        self._prefixes = PrefixTree(n_sequences)  # of the slots' tokens, those that are still to be computed as well
        self._clock = 0

    @property
    def n_free(self) -> int:
        """Requests that may be admitted."""
        return self._n_parallel - sum(s.is_busy for s in self.slots)

    def outline(self, most: int) -> Outline:
        """The shape of what sequences share; any thread, as PrefixTree.outline."""
        return self._prefixes.outline(most)

    def _most_held(self, tokens: list[int], but: int = -1) -> tuple[int, int]:
        """How many of a prompt's first tokens the slots spare it, and the sequence of the one that does; *but* is not asked."""
        most, holder = 0, -1
        for shared, sequences in self._prefixes.along(tokens):
            for sequence in sequences:
                if shared <= most:
                    return most, holder
                if sequence != but and (spared := self._reusable(sequence, shared)) > most:
                    most, holder = spared, sequence
        return most, holder

    def promised(self, tokens: list[int], at_least: int) -> Iterator[tuple[int, int]]:
        """Sequences that hold so many of a prompt's first tokens, or will once their own are computed; and how many."""
        for shared, sequences in self._prefixes.along(tokens):
            if shared < at_least:
                return
            for sequence in sequences:
                yield sequence, min(shared, self._prefixes.lengths[sequence])

    def holders(self, prompts: Iterable[list[int]]) -> set[int]:
        """The sequences that spare these prompts most."""
        return {holder for _, holder in map(self._most_held, prompts)} - {-1}

    def _reusable(self, sequence: int, shared: int) -> int:
        """How many tokens a slot spares a prompt that shares so many: what it holds of them and has not forgotten."""
        held = min(shared, self.slots[sequence].length)
        return resume_point(self._cache, sequence, held) if held else 0

    def _idle(self) -> list[Slot]:
        """Those that no request has: empty ones, then the one unused for longest, and so on."""
        return sorted((s for s in self.slots if not s.is_busy), key=lambda s: (s.length > 0, s.last_used))

    def _idle_sequences(self) -> list[int]:
        return [slot.sequence for slot in self.slots if not slot.is_busy]

    def n_spare(self, others: Iterable[int] = (), kept_by: int = -1, n_kept: int = 0) -> int:
        """Room that idle sequences and *others* would leave, but for the first *n_kept* tokens of one of them."""
        giving = {*self._idle_sequences(), *others}
        return self._cache.n_freed(giving, kept_by, n_kept if kept_by in giving else 0)

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
