"""The cache of full causal attention: every token sees itself and all before it.

K and V of a layer lie in one pool, a row of head_dim * n_kv_heads values per cell. Writing goes to any rows, by index.
Reading is a view of each sequence's own range, so attention costs what a sequence's own history costs. Sequences whose
ranges are equally far apart and about equally long are read by one call, as one four-dimensional view.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from puna.errors import BadRequest, PunaError
from puna.kvcache.batch import Batch, runs
from puna.kvcache.cache import Attended, Limits
from puna.kvcache.cells import CacheFull, Cells, padded
from puna.ml.backend import Backend, Context, row_bytes
from puna.ml.tensor import DType, Tensor

# Views grow in steps of this many cells, so a graph fits this many steps of decoding.
PADDING = 256

# Reading one more masked cell costs about what a visible one does: sequences share a call if at most this share is waste.
MAX_WASTE = 0.25

# A prefix that lies in more pieces than this is shared where it is instead of being copied.
MAX_COPIES = 4

# Keys are turned this many cells at a time, which bounds the working memory.
SHIFT_CELLS = 4096

END = 2**31 - 1  # after every position


# How the model turns cached keys by a change of position: (layer, keys [head_dim, n_kv_heads, m], changes I32 [m]).
Shift = Callable[[int, Tensor, Tensor], Tensor]


class NotSupported(PunaError):
    """The cache cannot do this; the caller computes the tokens again."""


@dataclass(frozen=True)
class View:
    """Part of the pool that a group of sequences reads; hashable, since graphs are built for it."""

    row: int  # first row of the batch
    n_rows: int  # rows of each sequence
    n_sequences: int
    begin: int  # first cell of the first sequence
    stride: int  # cells from one sequence's begin to the next's
    n_cells: int  # of each sequence


class CausalCache:
    """Shapes per layer: K [head_dim_k * n_kv_heads, n_cells], V likewise; allocated with the backend."""

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
    ) -> None:
        self.limits = limits
        self._backend = backend
        self._n_kv_heads = list(n_kv_heads)
        self._dims = (head_dim_k, head_dim_v)
        self._dtype = dtype
        self._shift = shift
        home = padded(limits.n_ctx, PADDING)
        self.cells = Cells(home * limits.max_sequences, limits.max_sequences)
        if dtype in (DType.Q8_0, DType.Q4_0) and any(dim % 32 for dim in self._dims):
            raise BadRequest(f"a {dtype.name} cache needs heads that are a multiple of 32 wide, this model's are {head_dim_k}")
        self._pools = [
            tuple(backend.storage(i, dtype, dim * n_heads, self.cells.n_cells) for dim in self._dims)
            for i, n_heads in enumerate(self._n_kv_heads)
        ]
        self._layer = 0
        self._views: tuple[View, ...] = ()
        self._rows = np.zeros(0, np.int64)
        self._batch: Batch | None = None
        self._row_input: Tensor | None = None
        self._mask_inputs: list[Tensor] = []

    # For models.

    def layer(self, index: int) -> None:
        self._layer = index

    def put(self, ctx: Context, key: Tensor, value: Tensor) -> None:
        assert self._row_input is not None, "make_inputs comes before the model's forward"
        for pool, new, dim in zip(self._pools[self._layer], (key, value), self._dims, strict=True):
            flat = new.reshape(dim * self._n_kv_heads[self._layer], len(self._rows))
            ctx.forward(ctx.use(pool).set_rows(flat, self._row_input))

    def get(self, ctx: Context) -> list[Attended]:
        return [self._attended(ctx, view, mask) for view, mask in zip(self._views, self._mask_inputs, strict=True)]

    def _attended(self, ctx: Context, view: View, mask: Tensor) -> Attended:
        parts = []
        n_heads = self._n_kv_heads[self._layer]
        for pool, dim in zip(self._pools[self._layer], self._dims, strict=True):
            cell_bytes = row_bytes(self._dtype, dim * n_heads)
            strides = (cell_bytes, row_bytes(self._dtype, dim), view.stride * cell_bytes)
            shape = (dim, view.n_cells, n_heads, view.n_sequences)
            parts.append(ctx.use(pool).view(shape, strides, view.begin * cell_bytes))
        return Attended(view.row, view.n_rows, view.n_sequences, parts[0], parts[1], mask)

    # For the runner.

    def start_forward(self, batch: Batch) -> Hashable:
        groups = runs(batch.sequences)
        if batch.n_tokens > self.cells.n_free:
            self.cells.place(0, batch.positions)  # raises, with the numbers
        placed = [self.cells.place(s, batch.positions[b:e]) for s, b, e in groups]
        self._rows = placed[0] if len(placed) == 1 else np.concatenate(placed)
        self._batch = batch
        self._views = tuple(self._plan(groups))
        return self._views

    def start_reserve(self, n_tokens: int) -> Hashable:
        self._rows = np.arange(n_tokens)
        self._batch = None
        self._views = (View(0, n_tokens, 1, 0, 0, self.cells.home_cells),)
        return self._views

    def _plan(self, groups: list[tuple[int, int, int]]) -> list[View]:
        views: list[View] = []
        lengths: list[int] = []
        for sequence, row, end in groups:
            begin = int(self.cells.begins[sequence]) // PADDING * PADDING
            length = padded(int(self.cells.ends[sequence]) - begin, PADDING)
            merged = self._merge(views[-1], lengths, begin, length, end - row) if views else None
            if merged:
                views[-1] = merged
                lengths.append(length)
            else:
                views.append(View(row, end - row, 1, begin, 0, length))
                lengths = [length]
        return views

    def _merge(self, view: View, lengths: list[int], begin: int, length: int, n_rows: int) -> View | None:
        """The view with one sequence more, if that keeps its distances equal and wastes little."""
        n = view.n_sequences + 1
        stride = begin - (view.begin + (n - 2) * view.stride)
        longest = max(view.n_cells, length)
        fits = begin + longest <= self.cells.n_cells
        is_even = stride > 0 and (n == 2 or stride == view.stride)
        waste = 1 - (sum(lengths) + length) / (longest * n)
        if n_rows != view.n_rows or not is_even or not fits or waste > MAX_WASTE:
            return None
        return View(view.row, n_rows, n, view.begin, stride, longest)

    def make_inputs(self, ctx: Context) -> None:
        self._row_input = ctx.input(DType.I64, len(self._rows))
        self._mask_inputs = [ctx.input(DType.F16, v.n_cells, v.n_rows, 1, v.n_sequences) for v in self._views]

    def set_inputs(self, ctx: Context) -> None:
        assert self._row_input is not None
        assert self._batch is not None, "a reserved graph is never computed"
        ctx.set(self._row_input, self._rows)
        for view, mask in zip(self._views, self._mask_inputs, strict=True):
            ctx.set(mask, self._mask(view, self._batch))

    def _mask(self, view: View, batch: Batch) -> npt.NDArray[np.float16]:
        """0 where a row sees a cell, -inf elsewhere: [n_sequences, n_rows, n_cells] in numpy's order."""
        rows = slice(view.row, view.row + view.n_sequences * view.n_rows)
        wanted = batch.positions[rows].reshape(view.n_sequences, view.n_rows)
        if view.n_sequences == 1:
            cells: slice | npt.NDArray[np.int64] = slice(view.begin, view.begin + view.n_cells)
            members = self.cells.members[batch.sequences[view.row], cells][None]
            positions = self.cells.positions[cells][None]
        else:
            begins = view.begin + view.stride * np.arange(view.n_sequences)
            cells = begins[:, None] + np.arange(view.n_cells)
            members = self.cells.members[batch.sequences[rows][:: view.n_rows, None], cells]
            positions = self.cells.positions[cells]
        # A position that no row can reach stands for what the sequence does not own.
        reach = np.where(members, positions, np.int32(END))
        seen = reach[:, None, :] <= wanted[:, :, None]
        return np.where(seen, np.float16(0), np.float16(-np.inf))

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """The rows are copied where that takes few copies, so that the target's range stays tight; else shared."""
        if source == target:
            return
        self.cells.remove(target, 0, END)
        cells = self.cells.cells_of(source, 0, length)
        if not len(cells):
            return
        try:
            copies = self.cells.place(target, self.cells.positions[cells])
        except CacheFull:
            self.cells.share(target, cells)
            return
        pieces = _pieces(cells, copies)
        if len(pieces) <= MAX_COPIES:
            self._copy(pieces)
        else:
            self.cells.remove(target, 0, END)
            self.cells.share(target, cells)

    def _copy(self, pieces: list[tuple[int, int, int]]) -> None:
        ctx = self._backend.context(16 + 2 * 3 * len(self._pools) * MAX_COPIES)
        for pools, n_heads in zip(self._pools, self._n_kv_heads, strict=True):
            for pool, dim in zip(pools, self._dims, strict=True):
                width = dim * n_heads
                cell_bytes = row_bytes(self._dtype, width)
                for begin, copy, count in pieces:
                    rows, target = (ctx.use(pool).view((width, count), (cell_bytes,), c * cell_bytes) for c in (begin, copy))
                    ctx.forward(rows.copy_to(target))
        ctx.compute()
        ctx.close()

    def can_resume(self, sequence: int, position: int) -> bool:
        return position <= self.length(sequence)

    def remove(self, sequence: int, begin: int, end: int | None = None) -> None:
        length = self.length(sequence)
        if end is None or end >= length:
            self.cells.remove(sequence, begin, END)
        elif begin < end:
            self._remove_middle(sequence, begin, end)

    def _remove_middle(self, sequence: int, begin: int, end: int) -> None:
        if self._shift is None or self.cells.is_shared(sequence, end):
            raise NotSupported("cached positions cannot be moved: the tokens after a removed range are computed again")
        self.cells.remove(sequence, begin, end)
        self.cells.shift(sequence, end, begin - end)
        moved = self.cells.cells_of(sequence, begin, END)
        first, last = int(moved.min()), int(moved.max()) + 1
        changes = np.zeros(last - first, np.int32)
        changes[moved - first] = begin - end
        for start in range(0, last - first, SHIFT_CELLS):
            part = changes[start : start + SHIFT_CELLS]
            if part.any():
                self._turn(first + start, part)

    def _turn(self, first: int, changes: npt.NDArray[np.int32]) -> None:
        """Turn the keys of all layers in the cells from first on; cells of others turn by nothing."""
        assert self._shift is not None
        ctx = self._backend.context(16 + 8 * len(self._pools))
        turns = ctx.input(DType.I32, len(changes))
        for i, ((pool, _), n_heads) in enumerate(zip(self._pools, self._n_kv_heads, strict=True)):
            dim = self._dims[0]
            strides = (row_bytes(self._dtype, dim), row_bytes(self._dtype, dim * n_heads))
            keys = ctx.use(pool).view((dim, n_heads, len(changes)), strides, first * strides[1])
            plain = keys if self._dtype is DType.F16 else keys.cast(DType.F32)
            ctx.forward(self._shift(i, plain, turns).copy_to(keys))
        ctx.set(turns, changes)
        ctx.compute()
        ctx.close()

    def length(self, sequence: int) -> int:
        return int(self.cells.lengths[sequence])

    def check_integrity(self) -> None:
        self.cells.check_integrity()


def _pieces(cells: npt.NDArray[np.int64], copies: npt.NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """(begin, begin of the copy, count) of each stretch that is contiguous on both sides."""
    cuts = np.flatnonzero((np.diff(cells) != 1) | (np.diff(copies) != 1)) + 1
    bounds = [0, *cuts.tolist(), len(cells)]
    return [(int(cells[b]), int(copies[b]), e - b) for b, e in pairwise(bounds)]
