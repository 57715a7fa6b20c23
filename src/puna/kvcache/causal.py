"""The cache of causal attention: every token sees itself and all before it, or as much of that as its attention span covers.

K and V of a layer lie in one pool, a row of head_dim * n_kv_heads values per cell. Writing goes to any rows, by index.
Reading is a view of each sequence's own range, so attention costs what a sequence's own history costs. Sequences whose
ranges are equally far apart and about equally long are read by one call, as one four-dimensional view.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from puna.errors import BadRequest
from puna.kvcache.batch import Batch, runs, text_axes
from puna.kvcache.cache import UNLIMITED, Attended, Limits, Saved
from puna.kvcache.cache import NotSupported as NotSupported
from puna.kvcache.cells import END, CacheFull, Cells, padded
from puna.kvcache.forgotten import Forgotten, Stretch, before, held_from, resume_point
from puna.kvcache.masks import HIDDEN, show
from puna.kvcache.rotation import key_turn, value_turn
from puna.kvcache.rows import Bytes, Pool, pieces, read_rows, write_rows
from puna.kvcache.span import Span
from puna.kvcache.views import PADDING, Range, View, plan
from puna.ml.backend import Backend, Context, row_bytes
from puna.ml.tensor import DType, Tensor

# A prefix that lies in more pieces than this is shared where it is instead of being copied.
MAX_COPIES = 4

# A full home forgets so many positions together, so that decoding need not look for the oldest at every step.
FORGOTTEN_AT_ONCE = 32

# Keys are turned this many cells at a time, which bounds the working memory.
SHIFT_CELLS = 4096

# How the model turns cached keys by a change of position: (layer, keys [head_dim, n_kv_heads, m], changes I32 [m], or [4 m]
# of a model whose positions have axes).
Shift = Callable[[int, Tensor, Tensor], Tensor]


# Every token sees all before it.
ALL = Span()


@dataclass(frozen=True)
class SavedCells:
    """Of one sequence, in the order of their positions."""

    positions: npt.NDArray[np.int32]
    rows: list[Bytes]  # of each pool

    @property
    def n_bytes(self) -> int:
        return sum(rows.nbytes for rows in self.rows) + self.positions.nbytes

    def resume_point(self, position: int) -> int:
        return min(position, int(self.positions[-1]) + 1)


@dataclass(frozen=True)
class SavedWindow:
    """Of one sequence of a cache that forgets."""

    window: Stretch
    forgotten: list[Stretch]
    span: Span

    @property
    def n_bytes(self) -> int:
        return sum(stretch.n_bytes for stretch in (*self.forgotten, self.window))

    def resume_point(self, position: int) -> int:
        return resume_point(min(position, self.window.end), self.window.begin, self.forgotten, self.span)


class CausalCache:
    """Shapes per layer: K [head_dim_k * n_kv_heads, n_cells], V likewise; allocated with the backend.

    Without *sees_ahead* not even the rows that a batch has see each other do so here.
    With *values_in_keys* a head's value is the beginning of its key and takes no memory of its own (DeepSeek-AI 2024).
    A layer with 0 key/value heads has nothing here. With a bounded attention span a sequence has room for its window and a batch.
    What no later row sees is forgotten when that room is needed, the oldest first; until then the sequence can resume there.
    What is forgotten of prompts is kept in the host's memory, if that is allowed, and goes back to the same places when
    a sequence resumes where it is seen: every row then reads the same values in the same order as before.
    """

    def __init__(
        self,
        backend: Backend,
        limits: Limits,
        *,
        n_kv_heads: Sequence[int],
        head_dim_k: int,
        head_dim_v: int,
        dtype: DType = DType.F16,
        shift: Shift | None = None,
        span: Span = ALL,
        values_in_keys: bool = False,
        has_axes: bool = False,
        sees_ahead: bool = True,
    ) -> None:
        self.limits = limits
        self.span = span
        self._backend = backend
        self._n_kv_heads = list(n_kv_heads)
        self._dims = (head_dim_k, head_dim_v)
        self._stored_dims = self._dims[:1] if values_in_keys else self._dims
        self._dtype = dtype
        self._shift = shift
        self._has_axes = has_axes
        self._sees_ahead = sees_ahead
        if dtype in (DType.Q8_0, DType.Q4_0) and any(dim % 32 for dim in self._dims):
            raise BadRequest(f"a {dtype.name} cache needs heads that are a multiple of 32 wide, this model's are {head_dim_k}")
        self._turns = self._widths_of_turns()
        # A forgetting sequence's home holds what it keeps and a batch, so it never needs another's room.
        small, large = (padded(n, PADDING) for n in (span.n_kept + limits.n_batch, -(-limits.n_cells // limits.max_sequences)))
        self.forgets = span.is_bounded and small < large
        home = small if self.forgets else large
        self.cells = Cells(home * limits.max_sequences, limits.max_sequences)
        self.forgotten = Forgotten(limits.max_sequences)
        self._prompt_ends = [0] * limits.max_sequences  # what came by several rows at once, and what was before it, is a prompt
        self._pools = {
            i: tuple(backend.storage(i, dtype, dim * n_heads, self.cells.n_cells) for dim in self._stored_dims)
            for i, n_heads in enumerate(self._n_kv_heads)
            if n_heads
        }
        self._layer = 0
        self._views: tuple[View, ...] = ()
        self._planned: tuple[list[Range], tuple[View, ...]] = [], ()
        self._rows = np.zeros(0, np.int64)
        self._batch: Batch | None = None
        self._row_input: Tensor | None = None
        self._mask_inputs: list[Tensor] = []
        self._staging = np.zeros(0, np.float16)

    def _widths_of_turns(self) -> tuple[int, int]:
        """How many channels of keys and of values are turned together; 0: none."""
        if self._dtype not in (DType.Q8_0, DType.Q4_0):
            return 0, 0
        keys = key_turn(self._dims[0])
        if len(self._stored_dims) == 2:
            return keys, value_turn(self._dims[1])
        is_closed = keys and self._dims[1] % keys == 0  # values lie in the keys and turn with them
        return (keys, keys) if is_closed else (0, 0)

    # For models.

    def layer(self, index: int) -> None:
        self._layer = index

    def put(self, ctx: Context, key: Tensor, value: Tensor) -> None:
        assert self._row_input is not None, "make_inputs comes before the model's forward"
        turned = [ctx.turn(new, width) if width else new for new, width in zip((key, value), self._turns, strict=True)]
        for pool, new in zip(self._pools[self._layer], turned, strict=False):  # values may lie in the keys
            ctx.forward(ctx.use(pool).set_rows(new.flatten(), self._row_input))

    def get(self, ctx: Context) -> list[Attended]:
        return [self._attended(ctx, view, mask) for view, mask in zip(self._views, self._mask_inputs, strict=True)]

    def _attended(self, ctx: Context, view: View, mask: Tensor) -> Attended:
        parts = []
        n_heads = self._n_kv_heads[self._layer]
        pools = self._pools[self._layer]
        for pool, stored_dim, dim in zip((pools[0], pools[-1]), (self._dims[0], self._stored_dims[-1]), self._dims, strict=True):
            cell_bytes = row_bytes(self._dtype, stored_dim * n_heads)
            strides = (cell_bytes, row_bytes(self._dtype, stored_dim), view.stride * cell_bytes)
            shape = (dim, view.n_cells, n_heads, view.n_sequences)
            parts.append(ctx.use(pool).view(shape, strides, view.begin * cell_bytes))
        return Attended(view.row, view.n_rows, view.n_sequences, parts[0], parts[1], mask, *self._turns)

    # For the runner.

    @property
    def n_cells(self) -> int:
        return 0 if self.forgets else self.cells.n_cells

    @property
    def n_free(self) -> int:
        return UNLIMITED if self.forgets else self.cells.n_free

    def n_freed(self, sequences: Collection[int], kept_by: int = -1, n_kept: int = 0) -> int:
        return 0 if self.forgets else self.cells.n_only(sequences, kept_by, n_kept)

    def check_room(self, batch: Batch) -> None:
        if not self.forgets and batch.n_tokens > self.cells.n_free:
            raise CacheFull(batch.n_tokens, self.cells.n_free)

    def start_forward(self, batch: Batch) -> Hashable:
        self.check_room(batch)
        groups = runs(batch.sequences)
        for sequence, row, end_row in groups if self.forgets else ():
            position, n_rows = int(batch.positions[row]), end_row - row
            if n_rows > 1:
                self._prompt_ends[sequence] = position + n_rows
            self._forget(sequence, position, n_rows)
        rows: list[int] = []
        for sequence, row, end_row in groups:
            rows += self.cells.place(sequence, batch.positions[row:end_row])
        self._rows = np.array(rows, np.int64)
        self._batch = batch
        firsts = (self.span.first(int(batch.positions[row])) for _, row, _ in groups)
        self._views = self._plan(Range(b, e, *self.cells.range_from(s, f)) for (s, b, e), f in zip(groups, firsts, strict=True))
        return self._views

    def _plan(self, ranges: Iterable[Range]) -> tuple[View, ...]:
        """The same views for as long as they cover the same rows and none grows beyond its padding."""
        wanted = [r.padded() for r in ranges]
        if wanted != self._planned[0]:
            self._planned = wanted, tuple(plan(wanted, self.cells.n_cells))
        return self._planned[1]

    def _forget(self, sequence: int, position: int, n_rows: int) -> None:
        """Drop the oldest that neither the row at this position nor a later one sees, if the new rows need the room."""
        assert position == self.length(sequence), f"sequence {sequence} goes on at {self.length(sequence)}, not at {position}"
        excess = self.cells.lengths[sequence] + n_rows - self.cells.home_cells
        if excess > 0:
            first, kept = self.cells.firsts[sequence], self.span.kept_from(position)
            assert first + excess <= kept, f"{n_rows} rows of sequence {sequence} are more than a batch"
            end = min(kept, first + max(excess, FORGOTTEN_AT_ONCE))
            self.forgotten.keep(sequence, first, min(end, self._prompt_ends[sequence]), partial(self._read, sequence))
            self.cells.remove(sequence, 0, end)

    def _read(self, sequence: int, begin: int, end: int) -> Stretch:
        """What the sequence holds in [begin, end), which is all of it.

        Errors: MemoryError.
        """
        cells = self.cells.cells_of(sequence, begin, end)
        assert len(cells) == end - begin, f"sequence {sequence} has gaps"
        rows = read_rows(self._backend, self._all_pools, cells)
        return Stretch(begin, end, cells - self._home(sequence), rows, sum(r.nbytes for r in rows))

    def _home(self, sequence: int) -> int:
        return sequence * self.cells.home_cells

    def _write(self, sequence: int, begin: int, end: int, stretches: Iterable[Stretch]) -> None:
        """What stretches have of the positions [begin, end) goes back to where it was."""
        for stretch in stretches:
            part = stretch.part(begin, end)
            if len(part):
                cells = self._home(sequence) + stretch.places[part]
                self.cells.place_at(sequence, cells, (stretch.begin + part).astype(np.int32))
                write_rows(self._backend, self._all_pools, stretch.rows, part, cells)

    def _live(self, sequence: int) -> int:
        """The first position that is in the cells."""
        return self.cells.firsts[sequence]

    def start_reserve(self, n_tokens: int) -> Hashable:
        self._rows = np.arange(n_tokens)
        self._batch = None
        longest = self.cells.home_cells if self.forgets else min(padded(self.limits.n_ctx, PADDING), self.cells.n_cells)
        self._views = (View(0, n_tokens, 1, 0, 0, longest),)
        return self._views

    def look_ahead(self, batch: Batch) -> Hashable | None:
        ranges = []
        for sequence, begin, end in runs(batch.sequences):
            first = self.span.first(int(batch.positions[begin]))
            found = self.cells.range_ahead(sequence, first, batch.positions[begin:end])
            if found is None:
                return None
            ranges.append(Range(begin, end, *found))
        self._rows = np.arange(batch.n_tokens)
        self._views = self._plan(ranges)
        return self._views

    @property
    def inputs(self) -> object:
        return self._row_input, self._mask_inputs

    @inputs.setter
    def inputs(self, made: Any) -> None:
        self._row_input, self._mask_inputs = made

    def make_inputs(self, ctx: Context) -> None:
        self._row_input = ctx.input(DType.I64, len(self._rows))
        self._mask_inputs = [ctx.input(DType.F16, v.n_cells, v.n_rows, 1, v.n_sequences) for v in self._views]

    def set_inputs(self, ctx: Context) -> None:
        assert self._row_input is not None
        assert self._batch is not None, "a reserved graph is never computed"
        ctx.set(self._row_input, self._rows)
        for view, mask in zip(self._views, self._mask_inputs, strict=True):
            shape = view.n_sequences, view.n_rows, view.n_cells
            memory = ctx.memory(mask)
            values = self._staged(shape) if memory is None else np.frombuffer(memory, np.float16).reshape(shape)
            self._write_mask(values, view, self._batch)
            if memory is None:
                ctx.set(mask, values)

    def _staged(self, shape: tuple[int, ...]) -> npt.NDArray[np.float16]:
        """Memory for a mask on its way to a device; kept, since the system takes longer to give it than writing takes."""
        size = math.prod(shape)
        if size > self._staging.size:
            self._staging = np.empty(size, np.float16)
        return self._staging[:size].reshape(shape)

    def _write_mask(self, mask: npt.NDArray[np.float16], view: View, batch: Batch) -> None:
        """0 where a row sees a cell, -inf elsewhere: [n_sequences, n_rows, n_cells] in numpy's order."""
        for i in range(view.n_sequences):
            row, begin = view.row + i * view.n_rows, view.begin + i * view.stride
            cells = slice(begin, begin + view.n_cells)
            self._show(mask[i], int(batch.sequences[row]), batch.positions[row : row + view.n_rows], cells)
        for begin, end in batch.bidirectional if self._sees_ahead else ():
            self._show_span(mask, view, begin, end)

    def _show(self, rows: npt.NDArray[np.float16], sequence: int, positions: npt.NDArray[np.int32], cells: slice) -> None:
        """Write which of these cells the rows of a sequence, at these positions, see: [n_rows, n_cells]."""
        position = int(positions[0])
        if len(rows) == 1 and position + 1 == self.cells.nexts[sequence]:  # it sees all that the sequence holds
            rows[0].fill(HIDDEN)
            np.copyto(rows[0], 0, where=self.cells.members[sequence, cells])
            first = self.span.first(position)
            if first > self.cells.firsts[sequence]:  # but for what lies outside the span
                np.putmask(rows[0], self.cells.positions[cells] < first, -np.inf)
            return
        # A position that no row can see stands for what the sequence does not own.
        held = np.where(self.cells.members[sequence, cells], self.cells.positions[cells], np.int32(END))
        show(rows, positions, held, self.span)

    def _show_span(self, mask: npt.NDArray[np.float16], view: View, begin: int, end: int) -> None:
        """Let the rows [begin, end) see each other, whatever their positions."""
        index, first = divmod(begin - view.row, view.n_rows)
        if 0 <= index < view.n_sequences:
            cells = self._rows[begin:end] - (view.begin + index * view.stride)
            mask[index, first : first + end - begin, cells] = 0

    # Sequences.

    def copy_prefix(self, source: int, target: int, length: int, *, by_reference: bool = False) -> None:
        """Where rows are copied, which takes few copies, the target's range stays tight."""
        if source == target:
            return
        self.cells.remove(target, 0, END)
        if self.forgets:
            self._copy_window(source, target, min(length, self.length(source)))
            return
        cells = self.cells.cells_of(source, 0, min(length, self.length(source)))
        if not len(cells):
            return
        if by_reference:
            self.cells.share(target, cells)
            return
        try:
            copies = np.array(self.cells.place(target, self.cells.positions[cells]), np.int64)
        except CacheFull:
            self.cells.share(target, cells)
            return
        stretches = pieces(cells, copies)
        if len(stretches) <= MAX_COPIES:
            self._copy(stretches)
        else:
            self.cells.remove(target, 0, END)
            self.cells.share(target, cells)

    def share_prefix(self, source: int, target: int, length: int) -> None:
        if not self.forgets and source != target:
            self.cells.unite(source, target, length)

    def _copy_window(self, source: int, target: int, length: int) -> None:
        """Rows go to the places in the target's home that they have in the source's."""
        self.forgotten.cut(target, 0)
        if length <= 0 or not self.can_resume(source, length):
            return
        begin = self._needed(source, length)
        cells = self.cells.cells_of(source, begin, length)
        if len(cells):
            copies = cells + self._home(target) - self._home(source)
            self.cells.place_at(target, copies, self.cells.positions[cells])
            stretches = pieces(cells, copies)
            for i in range(0, len(stretches), MAX_COPIES):
                self._copy(stretches[i : i + MAX_COPIES])
        self._write(target, begin, min(self._live(source), length), self.forgotten.of(source))
        self.forgotten.use(source)
        self.forgotten.share(source, target, length)
        self._prompt_ends[target] = length

    def _needed(self, sequence: int, position: int) -> int:
        """What must be held from here on to resume at a position, and one more if that is at hand: it could be computed again."""
        held = held_from(position, self._live(sequence), self.forgotten.of(sequence))
        return max(held, self.span.kept_from(position))

    def _copy(self, stretches: list[tuple[int, int, int]]) -> None:
        ctx = self._backend.context(16 + 2 * 3 * len(self._pools) * MAX_COPIES)
        for layer, pools in self._pools.items():
            for pool, dim in zip(pools, self._stored_dims, strict=True):
                width = dim * self._n_kv_heads[layer]
                cell_bytes = row_bytes(self._dtype, width)
                for begin, copy, count in stretches:
                    rows, target = (ctx.use(pool).view((width, count), (cell_bytes,), c * cell_bytes) for c in (begin, copy))
                    ctx.forward(rows.copy_to(target))
        ctx.compute()
        ctx.close()

    def can_resume(self, sequence: int, position: int) -> bool:
        return position <= 0 or self.prepare_restore(sequence, position) == position

    def prepare_restore(self, sequence: int, position: int) -> int:
        position = min(position, self.length(sequence))
        if not self.forgets:
            return position
        return resume_point(position, self._live(sequence), self.forgotten.of(sequence), self.span)

    def remove(self, sequence: int, begin: int, end: int | None = None, *, n_positions: int = 0) -> None:
        if end is not None and begin < end < self.length(sequence):
            self._remove_middle(sequence, begin, end, n_positions or end - begin)
        elif end is None or begin < end:
            begin = min(begin, self.length(sequence))
            if not self.can_resume(sequence, begin):
                begin = 0
            live, needed = self._live(sequence), self._needed(sequence, begin) if self.forgets else 0
            self.cells.remove(sequence, begin, END)
            if self.forgets:
                self._write(sequence, needed, min(live, begin), self.forgotten.of(sequence))
                self.forgotten.cut(sequence, begin)
                self._prompt_ends[sequence] = min(self._prompt_ends[sequence], begin)

    def check_remove(self, sequence: int, begin: int, end: int) -> None:
        length = self.length(sequence)
        if end >= length or begin >= end:
            return
        if self._shift is None or self.cells.is_shared(sequence, end):
            raise NotSupported("cached positions cannot be moved: the tokens after a removed range are computed again")
        if self.forgets:
            # What the next row will see: positions that stay, or that come from behind the removed range.
            first = max(self.span.first(length - (end - begin)), 0)
            if self.cells.firsts[sequence] > (first if first < begin else first + end - begin):
                raise NotSupported("the tokens before the removed range are no longer cached: they are computed again")

    def _remove_middle(self, sequence: int, begin: int, end: int, n_positions: int) -> None:
        self.check_remove(sequence, begin, end)
        # Rows that are somewhere else now may lie where forgotten ones beside them would have to go.
        self.forgotten.cut(sequence, 0)
        self._prompt_ends[sequence] = 0
        self.cells.remove(sequence, begin, end)
        self.cells.shift(sequence, end, begin - end)
        moved = self.cells.cells_of(sequence, begin, END)
        first, last = int(moved.min()), int(moved.max()) + 1
        changes = np.zeros(last - first, np.int32)
        changes[moved - first] = -n_positions
        for start in range(0, last - first, SHIFT_CELLS):
            part = changes[start : start + SHIFT_CELLS]
            if part.any():
                self._turn(first + start, part)

    def _turn(self, first: int, changes: npt.NDArray[np.int32]) -> None:
        """Turn the keys of all layers in the cells from first on; cells of others turn by nothing."""
        assert self._shift is not None
        ctx = self._backend.context(16 + 16 * len(self._pools))
        width = self._turns[0]
        turned_by = text_axes(changes) if self._has_axes else changes
        turns = ctx.input(DType.I32, turned_by.size)
        # Gets memory, even where no layer turns its keys: of an input that no operation has, the library would not see that it
        # is larger than in the graph before.
        ctx.forward(turns.view((1,), (), 0))
        for layer, (pool, *_) in self._pools.items():
            n_heads, dim = self._n_kv_heads[layer], self._dims[0]
            strides = (row_bytes(self._dtype, dim), row_bytes(self._dtype, dim * n_heads))
            keys = ctx.use(pool).view((dim, n_heads, len(changes)), strides, first * strides[1])
            plain = keys if self._dtype is DType.F16 else keys.cast(DType.F32)
            moved = self._shift(layer, ctx.turn(plain, width) if width else plain, turns)
            ctx.forward((ctx.turn(moved, width) if width else moved).copy_to(keys))
        ctx.set(turns, turned_by)
        ctx.compute()
        ctx.close()

    @property
    def _all_pools(self) -> list[Pool]:
        return [
            (pool, row_bytes(self._dtype, dim * self._n_kv_heads[layer]))
            for layer, pools in self._pools.items()
            for pool, dim in zip(pools, self._stored_dims, strict=True)
        ]

    def saved_bytes(self, sequence: int, *, lean: bool = False) -> int:
        row = sum(n for _, n in self._all_pools)
        if self.forgets:
            forgotten = () if lean else self.forgotten.of(sequence)
            return self.cells.lengths[sequence] * row + sum(stretch.n_bytes for stretch in forgotten)
        return self.cells.lengths[sequence] * (row + self.cells.positions.itemsize)

    def save(self, sequence: int, *, lean: bool = False) -> SavedCells | SavedWindow:
        if self.forgets:
            window = self._read(sequence, self._live(sequence), self.length(sequence))
            return SavedWindow(window, [] if lean else list(self.forgotten.of(sequence)), self.span)
        cells = self.cells.cells_of(sequence, 0, END)
        return SavedCells(self.cells.positions[cells], read_rows(self._backend, self._all_pools, cells))

    def restore(self, sequence: int, saved: Saved, length: int) -> None:
        assert not self.cells.lengths[sequence], f"sequence {sequence} is not empty"
        if isinstance(saved, SavedWindow):
            held = held_from(length, saved.window.begin, saved.forgotten)
            begin = max(held, self.span.kept_from(length))
            self._write(sequence, 0, length, [saved.window])
            self._write(sequence, begin, min(saved.window.begin, length), saved.forgotten)
            self.forgotten.adopt(sequence, before(saved.forgotten, length))
            self._prompt_ends[sequence] = length
            return
        assert isinstance(saved, SavedCells), "saved by another cache"
        n_rows = int(np.searchsorted(saved.positions, length))
        if n_rows:
            cells = np.array(self.cells.place(sequence, saved.positions[:n_rows]), np.int64)
            write_rows(self._backend, self._all_pools, saved.rows, np.arange(n_rows), cells)

    def remember(self, max_bytes: int, spare: Callable[[], int]) -> None:
        self.forgotten.allow(max_bytes if self.forgets else 0, spare)

    @property
    def remembered_bytes(self) -> int:
        return self.forgotten.n_bytes

    def length(self, sequence: int) -> int:
        return self.cells.nexts[sequence]

    def check_integrity(self) -> None:
        self.cells.check_integrity()
        self.forgotten.check_integrity()
        for sequence in range(self.limits.max_sequences) if self.forgets else ():
            n_held = self.cells.lengths[sequence]
            assert n_held == self.cells.nexts[sequence] - self.cells.firsts[sequence], f"sequence {sequence} has gaps"
            assert self.can_resume(sequence, self.length(sequence)), f"sequence {sequence} holds less than its window"
            assert n_held <= self.cells.home_cells, f"sequence {sequence} holds more than its home"
            home = sequence * self.cells.home_cells
            begin, end = self.cells.begins[sequence], self.cells.ends[sequence]
            is_home = home <= begin and end <= home + self.cells.home_cells
            assert not n_held or is_home, f"sequence {sequence} lies outside its home"
