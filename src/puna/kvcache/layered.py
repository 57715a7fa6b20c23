"""Several caches as one, each for some of the layers: windows beside full attention, recurrent layers beside both.

Which layer goes to which cache is settled at construction. What the runner asks is asked of all; an operation that one
of them would refuse changes none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from puna.kvcache.batch import Batch
from puna.kvcache.cache import UNLIMITED, Attended, CachePart, RememberingCache, Saved, SavingCache, StepEndCache
from puna.kvcache.cells import CacheFull
from puna.kvcache.encoder import EncoderCache
from puna.kvcache.recurrent import RecurrentCache, StateCache, StateGroup
from puna.ml.backend import Context
from puna.ml.tensor import Tensor


@dataclass(frozen=True)
class SavedParts:
    parts: list[Saved]  # by part of the cache

    @property
    def n_bytes(self) -> int:
        return sum(part.n_bytes for part in self.parts)

    def resume_point(self, position: int) -> int:
        while (least := min(part.resume_point(position) for part in self.parts)) != position:
            position = least
        return position


class LayeredCache:
    """``choice[i]`` is the index in *parts* of the cache that layer i uses.

    The states of a layer that attends as well are in the recurrent part, whichever its choice is.
    """

    def __init__(self, parts: Sequence[CachePart], choice: Sequence[int], max_sequences: int) -> None:
        self._recurrent = next((part for part in parts if isinstance(part, StateCache)), None)
        self.encoder = next((part for part in parts if isinstance(part, EncoderCache)), None)
        unused = [p for i, p in enumerate(parts) if i not in choice and p is not self._recurrent]
        assert not unused, "the inputs of a part without layers would be in no graph"
        self.parts = list(parts)
        self.max_sequences = max_sequences
        self._choice = list(choice)
        self._active = self.parts[0]
        self._bounded = [part for part in self.parts if part.n_cells]

    # For models.

    def layer(self, index: int) -> None:
        self._active = self.parts[self._choice[index]]
        self._active.layer(index)
        if self._recurrent is not None:
            self._recurrent.layer(index)

    def put(self, ctx: Context, key: Tensor, value: Tensor) -> None:
        self._active.put(ctx, key, value)

    def get(self, ctx: Context) -> list[Attended]:
        return self._active.get(ctx)

    def states(self, ctx: Context) -> list[StateGroup]:
        assert self._recurrent is not None, "no layer of this model is recurrent"
        return self._recurrent.states(ctx)

    def visible(self) -> Tensor | None:
        assert self.encoder is not None, "no layer of this model looks at images"
        return self.encoder.visible()

    # For the runner.

    @property
    def prompt_tail(self) -> int:
        return self._recurrent.prompt_tail if isinstance(self._recurrent, StepEndCache) else 0

    @property
    def n_cells(self) -> int:
        return min((part.n_cells for part in self._bounded), default=0)

    @property
    def n_free(self) -> int:
        return min((part.n_free for part in self._bounded), default=UNLIMITED)

    def n_freed(self, sequences: Collection[int], kept_by: int = -1, n_kept: int = 0) -> int:
        return min((part.n_freed(sequences, kept_by, n_kept) for part in self._bounded), default=0)

    def check_room(self, batch: Batch) -> None:
        for part in self.parts:
            part.check_room(batch)

    def start_forward(self, batch: Batch) -> Hashable:
        self.check_room(batch)
        return tuple(part.start_forward(batch) for part in self.parts)

    def start_reserve(self, n_tokens: int) -> Hashable:
        return tuple(part.start_reserve(n_tokens) for part in self.parts)

    def look_ahead(self, batch: Batch) -> Hashable | None:
        shapes = tuple(part.look_ahead(batch) for part in self.parts)
        return None if None in shapes else shapes

    @property
    def inputs(self) -> object:
        return [part.inputs for part in self.parts]

    @inputs.setter
    def inputs(self, made: Any) -> None:
        for part, of_part in zip(self.parts, made, strict=True):
            part.inputs = of_part

    def make_inputs(self, ctx: Context) -> None:
        for part in self.parts:
            part.make_inputs(ctx)

    def set_inputs(self, ctx: Context) -> None:
        for part in self.parts:
            part.set_inputs(ctx)

    def copy_prefix(self, source: int, target: int, length: int, *, by_reference: bool = False) -> None:
        if source == target:
            return
        # Only as far as all parts can go on: each of them then copies what that needs.
        length = self.prepare_restore(source, length)
        for part in self.parts:
            part.copy_prefix(source, target, length, by_reference=by_reference)

    def share_prefix(self, source: int, target: int, length: int) -> None:
        for part in self._bounded:
            part.share_prefix(source, target, length)

    def can_resume(self, sequence: int, position: int) -> bool:
        return all(part.can_resume(sequence, position) for part in self.parts)

    def prepare_restore(self, sequence: int, position: int) -> int:
        while not self.can_resume(sequence, position):
            # Some part cannot resume here, so its answer is smaller; 0 is possible for all.
            position = min(part.prepare_restore(sequence, position) for part in self.parts)
        return position

    def remove(self, sequence: int, begin: int, end: int | None = None, *, n_positions: int = 0) -> None:
        if end is not None and end < self.length(sequence):
            self.check_remove(sequence, begin, end)
            for part in self.parts:
                part.remove(sequence, begin, end, n_positions=n_positions)
            return
        # A part that cannot resume at begin would forget all; then the others need not hold what is left either.
        begin = min(begin, self.length(sequence))
        kept = begin if self.can_resume(sequence, begin) else 0
        for part in self.parts:
            part.remove(sequence, kept)

    def check_remove(self, sequence: int, begin: int, end: int) -> None:
        for part in self.parts:
            part.check_remove(sequence, begin, end)

    def saved_bytes(self, sequence: int, *, lean: bool = False) -> int:
        sizes = [part.saved_bytes(sequence, lean=lean) if isinstance(part, SavingCache) else 0 for part in self.parts]
        return sum(sizes) if all(sizes) else 0

    def save(self, sequence: int, *, lean: bool = False) -> SavedParts:
        return SavedParts([part.save(sequence, lean=lean) for part in self._saving_parts])

    def restore(self, sequence: int, saved: Saved, length: int) -> None:
        assert isinstance(saved, SavedParts), "saved by another cache"
        pairs = list(zip(self._saving_parts, saved.parts, strict=True))
        # States always find room, but may take it from others: they come last, when all else has some.
        pairs.sort(key=lambda pair: isinstance(pair[0], RecurrentCache))
        try:
            for part, of_part in pairs:
                part.restore(sequence, of_part, length)
        except CacheFull:
            for part, _ in pairs:
                part.remove(sequence, 0)
            raise

    @property
    def _saving_parts(self) -> list[SavingCache]:
        parts: list[SavingCache] = [part for part in self.parts if isinstance(part, SavingCache)]
        assert len(parts) == len(self.parts), "saved_bytes said that nothing is saved"
        return parts

    def remember(self, max_bytes: int, spare: Callable[[], int]) -> None:
        parts = [part for part in self.parts if isinstance(part, RememberingCache) and part.forgets]
        for part in parts:
            part.remember(max_bytes // len(parts), spare)

    @property
    def remembered_bytes(self) -> int:
        return sum(part.remembered_bytes for part in self.parts if isinstance(part, RememberingCache))

    @property
    def forgets(self) -> bool:
        return any(part.forgets for part in self.parts if isinstance(part, RememberingCache))

    def length(self, sequence: int) -> int:
        return self.parts[0].length(sequence)

    def check_integrity(self) -> None:
        for part in self.parts:
            part.check_integrity()
        for sequence in range(self.max_sequences):
            lengths = {part.length(sequence) for part in self.parts}
            assert len(lengths) == 1, f"the parts disagree on how long sequence {sequence} is: {sorted(lengths)}"
