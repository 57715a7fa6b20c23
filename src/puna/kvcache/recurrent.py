"""The cache of recurrent layers: of each sequence a state of fixed size instead of a history.

A step reads states from some slots and writes the new ones to others, by index, so a state that something else still
needs (another sequence, a checkpoint, an aborted step) is never overwritten and never copied. Sequences may have different
numbers of tokens in a step: neighbours with equally many form a group, and the model computes group by group.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, runtime_checkable

import numpy as np

from puna.kvcache.batch import Batch, runs
from puna.kvcache.cache import UNLIMITED, Attended, Limits, NotSupported, Saved
from puna.kvcache.checkpoints import PROMPT_TAIL, START, Checkpoints, State
from puna.kvcache.rows import Bytes, Pool, read_rows, write_rows
from puna.ml.backend import Backend, Context, row_bytes
from puna.ml.tensor import DType, Tensor

# Checkpoints per sequence at most, tokens between them, and bytes that those of all sequences may take. A state is 160 kB
# in LFM2 1.2B and 75 MB in Qwen3-Next.
N_CHECKPOINTS, INTERVAL, CHECKPOINT_BYTES = 8, 1024, 256 << 20

# A state is written as so many rows at most: ggml's threads share rows among them, and one state may be megabytes.
_PARTS = 16


@dataclass(frozen=True)
class StateGroup:
    """Rows of the batch, n_sequences times n_rows, and the states of their sequences in this layer."""

    begin: int  # first row
    n_rows: int  # of each sequence
    n_sequences: int
    ctx: Context
    pools: Mapping[str, Tensor]
    sources: Tensor  # slots of the states before this step, I32 [n_sequences]
    targets: Tensor  # where the parts of each go after it, I64 [n_parts * n_sequences]

    def rows(self, x: Tensor, begin: int = 0, width: int = 0) -> Tensor:
        """Values [begin, begin + width) of this group's rows of x [n_values, n], which is contiguous; all unless stated.

        [width, n_rows, n_sequences], a view.
        """
        row = row_bytes(DType.F32, x.shape[0])
        shape = (width or x.shape[0], self.n_rows, self.n_sequences)
        return x.view(shape, (row, row * self.n_rows), row * self.begin + row_bytes(DType.F32, begin))

    def load(self, name: str) -> Tensor:
        """The states before this step: F32 [width, n_sequences]."""
        return self.ctx.use(self.pools[name]).rows(self.sources)  # type: ignore[no-any-return]

    def pool(self, name: str) -> Tensor:
        """For operations that find the states themselves: those of all slots, [width, n_slots]; sources says which."""
        return self.ctx.use(self.pools[name])  # type: ignore[no-any-return]

    def store(self, name: str, state: Tensor) -> None:
        """The states after this step, of as many values; once per name."""
        pool, n = self.pools[name], self.targets.shape[0]
        n_parts = n // self.n_sequences
        width = pool.shape[0] // n_parts
        parts = self.ctx.use(pool).reshape(width, pool.shape[1] * n_parts)
        self.ctx.forward(parts.set_rows(state.reshape(width, n), self.targets))


@runtime_checkable
class StateCache(Protocol):
    def states(self, ctx: Context) -> list[StateGroup]:
        """Groups that cover all rows in order, for the layer named last. Each state must be stored."""


@dataclass(frozen=True)
class SavedStates:
    """Of one sequence, in the order of their lengths; at least one."""

    states: list[State]
    rows: list[Bytes]  # of each pool

    @property
    def n_bytes(self) -> int:
        return sum(rows.nbytes for rows in self.rows)

    def resume_point(self, position: int) -> int:
        return max((s.length for s in self.states if s.length <= position), default=0)


class RecurrentCache:
    """``widths[i]`` names the states of layer i and says how many F32 values each has; empty for other layers.

    Per state and layer a pool [width, n_slots].
    """

    def __init__(
        self,
        backend: Backend,
        limits: Limits,
        *,
        widths: Sequence[Mapping[str, int]],
        n_checkpoints: int = N_CHECKPOINTS,
        interval: int = INTERVAL,
        checkpoint_bytes: int = CHECKPOINT_BYTES,
    ) -> None:
        self.limits = limits
        self._backend = backend
        state_bytes = row_bytes(DType.F32, sum(sum(names.values()) for names in widths))
        self.checkpoints = Checkpoints(limits.max_sequences, n_checkpoints, interval, checkpoint_bytes // state_bytes)
        self._pools = [
            {name: backend.storage(i, DType.F32, width, self.checkpoints.n_slots) for name, width in names.items()}
            for i, names in enumerate(widths)
        ]
        self._n_parts = math.gcd(_PARTS, *(width for names in widths for width in names.values()))
        self._layer = 0
        self._groups: list[tuple[int, int, int]] = []  # first row, rows of each sequence, sequences
        self._slots = np.zeros((2, 0), np.int64)  # read and write, of each sequence in the batch
        self.inputs: Any = []  # (read, write) of each group

    # For models.

    def layer(self, index: int) -> None:
        self._layer = index

    def states(self, ctx: Context) -> list[StateGroup]:
        pools = self._pools[self._layer]
        return [StateGroup(*group, ctx, pools, *io) for group, io in zip(self._groups, self.inputs, strict=True)]

    def put(self, ctx: Context, key: Tensor, value: Tensor) -> None:
        self._has_no_keys()

    def get(self, ctx: Context) -> list[Attended]:
        self._has_no_keys()

    def _has_no_keys(self) -> NoReturn:
        raise AssertionError(f"layer {self._layer} is recurrent: it has states, no keys")

    # For the runner.

    prompt_tail = PROMPT_TAIL

    n_cells, n_free = 0, UNLIMITED  # a state takes no more room for more tokens

    def n_freed(self, sequences: Collection[int], kept_by: int = -1, n_kept: int = 0) -> int:
        return 0

    def check_room(self, batch: Batch) -> None:
        """There is always room."""

    def start_forward(self, batch: Batch) -> Hashable:
        groups = runs(batch.sequences)
        for sequence, row, _ in groups:
            position, length = int(batch.positions[row]), self.length(sequence)
            assert position == length, f"sequence {sequence} goes on at {length}, not at {position}"
        self.checkpoints.start_step()
        slots = [self.checkpoints.advance(s, end - row) for s, row, end in groups]
        self._slots = np.array(slots, np.int64).T
        self._groups = _grouped([end - row for _, row, end in groups])
        return tuple(self._groups)

    def start_reserve(self, n_tokens: int) -> Hashable:
        n_sequences = min(self.limits.max_sequences, n_tokens)
        counts = [n_tokens // n_sequences] * n_sequences
        counts[-1] += n_tokens - sum(counts)
        self._slots = np.full((2, n_sequences), START, np.int64)
        self._groups = _grouped(counts)
        return tuple(self._groups)

    def look_ahead(self, batch: Batch) -> Hashable | None:
        self._groups = _grouped([end - row for _, row, end in runs(batch.sequences)])
        return tuple(self._groups)

    def make_inputs(self, ctx: Context) -> None:
        self.inputs = [(ctx.input(DType.I32, n), ctx.input(DType.I64, n * self._n_parts)) for _, _, n in self._groups]

    def set_inputs(self, ctx: Context) -> None:
        assert START not in self._slots[1], "a reserved graph is never computed"
        begin = 0
        for (_, _, n), (sources, targets) in zip(self._groups, self.inputs, strict=True):
            ctx.set(sources, np.ascontiguousarray(self._slots[0, begin : begin + n], np.int32))
            parts = self._slots[1, begin : begin + n, None] * self._n_parts + np.arange(self._n_parts)
            ctx.set(targets, parts.reshape(-1))
            begin += n

    # Sequences.

    def copy_prefix(self, source: int, target: int, length: int, *, by_reference: bool = False) -> None:
        """The target shares the states; each writes its next to a slot of its own."""
        if source != target:
            self.checkpoints.cut(target, 0)
            self.checkpoints.share(source, target, length)

    def share_prefix(self, source: int, target: int, length: int) -> None:
        """States take no room of a pool."""

    def can_resume(self, sequence: int, position: int) -> bool:
        return self.prepare_restore(sequence, position) == position

    def prepare_restore(self, sequence: int, position: int) -> int:
        return self.checkpoints.restore_point(sequence, position)

    def remove(self, sequence: int, begin: int, end: int | None = None, *, n_positions: int = 0) -> None:
        if end is not None and end < self.length(sequence):
            self.check_remove(sequence, begin, end)
        elif end is None or begin < end:
            begin = min(begin, self.length(sequence))
            self.checkpoints.cut(sequence, begin if self.can_resume(sequence, begin) else 0)

    def check_remove(self, sequence: int, begin: int, end: int) -> None:
        if begin < end < self.length(sequence):
            raise NotSupported("a recurrent state cannot forget tokens in the middle: what follows them is computed again")

    @property
    def _all_pools(self) -> list[Pool]:
        return [(pool, row_bytes(DType.F32, pool.shape[0])) for pools in self._pools for pool in pools.values()]

    def saved_bytes(self, sequence: int, *, lean: bool = False) -> int:
        return len(self.checkpoints.worth_saving(sequence)) * sum(n for _, n in self._all_pools)

    def save(self, sequence: int, *, lean: bool = False) -> SavedStates:
        states = self.checkpoints.worth_saving(sequence)
        return SavedStates(states, read_rows(self._backend, self._all_pools, np.array([s.slot for s in states], np.int64)))

    def restore(self, sequence: int, saved: Saved, length: int) -> None:
        assert isinstance(saved, SavedStates), "saved by another cache"
        states = [s for s in saved.states if s.length <= length]
        if states:
            slots = np.array(self.checkpoints.restore(sequence, states), np.int64)
            source = np.arange(len(states) - len(slots), len(states))
            write_rows(self._backend, self._all_pools, saved.rows, source, slots)

    def length(self, sequence: int) -> int:
        return self.checkpoints.length(sequence)

    def check_integrity(self) -> None:
        self.checkpoints.check_integrity()


def _grouped(counts: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first row, rows of each sequence, sequences) of neighbours with equally many rows."""
    groups: list[tuple[int, int, int]] = []
    row = 0
    for count in counts:
        if groups and groups[-1][1] == count:
            groups[-1] = (groups[-1][0], count, groups[-1][2] + 1)
        else:
            groups.append((row, count, 1))
        row += count
    return groups
