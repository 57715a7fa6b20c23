"""The cache of cross attention: of each sequence the keys and values of what its encoder last made.

They have no positions of their own, but belong to the position of the token that stands for the image: rows from there on
see them, earlier ones do not. Removing that position forgets them. A later image takes the place of an earlier one, and
the sequence can then not go back to between the two.

They are stored before the step that has that token, some rows after others, by graphs that do nothing else. Until that step
the sequence computes nothing; what is removed of it, though it be nothing, forgets what was stored so far.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from puna.errors import BadRequest
from puna.kvcache.batch import Batch, Encoded, runs
from puna.kvcache.cache import UNLIMITED, Attended, Limits
from puna.kvcache.cells import padded
from puna.kvcache.views import PADDING, Range, View, plan
from puna.ml.backend import Backend, Context, row_bytes
from puna.ml.tensor import DType, Tensor

NONE = -1  # the position of what was never stored


class SightCache(Protocol):
    """A cache for models some of whose layers look at images, beside what it is for the others."""

    def visible(self) -> Tensor | None:
        """F32 [1, n_tokens]: 1 for rows that see something, 0 for the others; None where none of the step does."""


class EncoderCache:
    """Shapes per layer: K [head_dim * n_kv_heads, max_sequences * home], V likewise; a home has room for n_encoded rows.

    Put stores rows of an image in a graph of their own; in that of a step there is only get. A row that sees nothing gets a
    meaningless but finite result, so the model multiplies what attention gives by ``visible``. In a step in which no row
    sees anything there is no attention at all.
    """

    def __init__(
        self,
        backend: Backend,
        limits: Limits,
        *,
        n_encoded: int,
        n_kv_heads: Sequence[int],
        head_dim: int,
        dtype: DType = DType.F16,
    ) -> None:
        self.limits = limits
        self._backend = backend
        self._n_encoded = n_encoded
        self._n_kv_heads = list(n_kv_heads)
        self._head_dim = head_dim
        self._dtype = dtype
        self._home = padded(n_encoded, PADDING)
        n_cells = self._home * limits.max_sequences
        self._pools = {
            i: tuple(backend.storage(i, dtype, head_dim * n_heads, n_cells) for _ in range(2))
            for i, n_heads in enumerate(self._n_kv_heads)
            if n_heads
        }
        # Of each sequence: what was encoded, by position, of which only the stored one is still there.
        self._encoded: list[list[Encoded]] = [[] for _ in range(limits.max_sequences)]
        self._stored = np.full(limits.max_sequences, NONE, np.int64)
        self._n_ahead = np.zeros(limits.max_sequences, np.int64)  # rows that are there of an image whose step is to come
        self._lengths = np.zeros(limits.max_sequences, np.int64)
        self._layer = 0
        self._views: tuple[View, ...] = ()
        self._batch: Batch | None = None
        self._n_tokens = 0
        self._row_input: Tensor | None = None
        self._visible_input: Tensor | None = None
        self._mask_inputs: list[Tensor] = []

    # For models.

    def layer(self, index: int) -> None:
        self._layer = index

    def put(self, ctx: Context, key: Tensor, value: Tensor) -> None:
        assert self._row_input is not None, "a step only reads"
        for pool, new in zip(self._pools[self._layer], (key, value), strict=True):
            ctx.forward(ctx.use(pool).set_rows(new.flatten(), self._row_input))

    def get(self, ctx: Context) -> list[Attended]:
        n_heads = self._n_kv_heads[self._layer]
        cell_bytes, head_bytes = row_bytes(self._dtype, self._head_dim * n_heads), row_bytes(self._dtype, self._head_dim)
        found = []
        for view, mask in zip(self._views, self._mask_inputs, strict=True):
            shape = (self._head_dim, view.n_cells, n_heads, view.n_sequences)
            strides = (cell_bytes, head_bytes, view.stride * cell_bytes)
            key, value = (ctx.use(p).view(shape, strides, view.begin * cell_bytes) for p in self._pools[self._layer])
            found.append(Attended(view.row, view.n_rows, view.n_sequences, key, value, mask))
        return found

    def visible(self) -> Tensor | None:
        return self._visible_input

    # For the runner, before the step of an image's token.

    def n_ahead(self, sequence: int) -> int:
        """Rows stored of the image whose token the sequence computes next."""
        return int(self._n_ahead[sequence])

    def make_rows(self, ctx: Context, n_rows: int) -> None:
        """The input of a new graph that puts so many rows of an image."""
        self._row_input = ctx.input(DType.I64, n_rows)

    def set_rows(self, ctx: Context, sequence: int, begin: int, end: int) -> None:
        """They are these rows of the image, of which those before are there; the first take the place of an earlier image.

        Errors: BadRequest for more rows than a sequence has room for; then nothing has changed.
        """
        if end > self._n_encoded:
            raise BadRequest(f"an image of {end} encoder rows does not fit the model's {self._n_encoded}")
        assert begin in (0, self.n_ahead(sequence)), (
            f"of sequence {sequence} {self.n_ahead(sequence)} rows are there, not {begin}"
        )
        assert self._row_input is not None
        self._stored[sequence] = NONE
        self._n_ahead[sequence] = begin
        ctx.set(self._row_input, self._home * sequence + np.arange(begin, end))

    def note_rows(self, sequence: int, end: int) -> None:
        """That graph was computed: so many are there."""
        self._n_ahead[sequence] = end

    # For the runner.

    n_cells, n_free = 0, UNLIMITED  # text tokens take no room here

    def n_freed(self, sequences: Collection[int], kept_by: int = -1, n_kept: int = 0) -> int:
        return 0

    def check_room(self, batch: Batch) -> None:
        """Each sequence has a home."""

    def start_forward(self, batch: Batch) -> Hashable:
        for new in batch.encoded:
            assert 0 < new.n_rows == self.n_ahead(new.sequence), f"{new} comes before all of its rows are stored"
            # Earlier rows of the same step would still need the image that goes.
            is_first = not self._encoded[new.sequence] or new.position == self.length(new.sequence)
            assert is_first, f"sequence {new.sequence}: a step begins with the image that takes another's place"
            self._encoded[new.sequence].append(new)
            self._stored[new.sequence] = new.position
            self._n_ahead[new.sequence] = 0
        self._batch, self._n_tokens = batch, batch.n_tokens
        for sequence, _, end in runs(batch.sequences):
            self._lengths[sequence] = batch.positions[end - 1] + 1
        self._views = self._plan(batch)
        return self._views

    def _plan(self, batch: Batch) -> tuple[View, ...]:
        if not self._sees(batch).any():
            return ()
        homes = ((s * self._home, self._n_stored(s), b, e) for s, b, e in runs(batch.sequences))
        return tuple(plan([Range(b, e, home, home + max(n, 1)) for home, n, b, e in homes], self._n_cells))

    @property
    def _n_cells(self) -> int:
        return self._home * self.limits.max_sequences

    def _n_stored(self, sequence: int) -> int:
        return self._encoded[sequence][-1].n_rows if self._encoded[sequence] else 0

    def start_reserve(self, n_tokens: int) -> Hashable:
        self._batch, self._n_tokens = None, n_tokens
        self._views = (View(0, n_tokens, 1, 0, 0, self._home),)
        return self._views

    def look_ahead(self, batch: Batch) -> Hashable | None:
        if batch.encoded:
            return None
        self._n_tokens = batch.n_tokens
        self._views = self._plan(batch)
        return self._views

    @property
    def inputs(self) -> object:
        return self._visible_input, self._mask_inputs

    @inputs.setter
    def inputs(self, made: Any) -> None:
        self._visible_input, self._mask_inputs = made

    def make_inputs(self, ctx: Context) -> None:
        self._row_input = None
        self._visible_input = ctx.input(DType.F32, 1, self._n_tokens) if self._views else None
        self._mask_inputs = [ctx.input(DType.F16, v.n_cells, v.n_rows, 1, v.n_sequences) for v in self._views]

    def set_inputs(self, ctx: Context) -> None:
        assert self._batch is not None, "a reserved graph is never computed"
        if self._visible_input is not None:
            ctx.set(self._visible_input, self._sees(self._batch).astype(np.float32)[:, None])
        for view, mask in zip(self._views, self._mask_inputs, strict=True):
            ctx.set(mask, self._mask(view, self._batch))

    def _sees(self, batch: Batch) -> npt.NDArray[np.bool_]:
        stored = self._stored[batch.sequences]
        sees: npt.NDArray[np.bool_] = (stored != NONE) & (batch.positions >= stored)
        return sees

    def _mask(self, view: View, batch: Batch) -> npt.NDArray[np.float16]:
        """All rows of a sequence see all that is stored; softmax needs one cell even where there is nothing."""
        sequences = batch.sequences[view.row : view.row + view.n_sequences * view.n_rows : view.n_rows]
        counts = np.array([max(self._n_stored(int(s)), 1) for s in sequences])
        seen = np.arange(view.n_cells) < counts[:, None, None]
        seen = np.broadcast_to(seen, (view.n_sequences, view.n_rows, view.n_cells))
        return np.where(seen, np.float16(0), np.float16(-np.inf))

    # Sequences.

    def share_prefix(self, source: int, target: int, length: int) -> None:
        """Each sequence has a home for what is encoded."""

    def copy_prefix(self, source: int, target: int, length: int, *, by_reference: bool = False) -> None:
        if source == target:
            return
        self._forget(target, 0)
        length = min(length, self.length(source))
        if not self.can_resume(source, length):
            return
        self._encoded[target] = [e for e in self._encoded[source] if e.position < length]
        self._lengths[target] = length
        if self._encoded[target]:
            self._stored[target] = self._encoded[target][-1].position
            self._copy(source, target, self._n_stored(source))

    def _copy(self, source: int, target: int, count: int) -> None:
        ctx = self._backend.context(16 + 2 * 3 * len(self._pools))
        for layer, pools in self._pools.items():
            width = self._head_dim * self._n_kv_heads[layer]
            cell_bytes = row_bytes(self._dtype, width)
            for pool in pools:
                homes = (s * self._home * cell_bytes for s in (source, target))
                rows, copy = (ctx.use(pool).view((width, count), (cell_bytes,), home) for home in homes)
                ctx.forward(rows.copy_to(copy))
        ctx.compute()
        ctx.close()

    def can_resume(self, sequence: int, position: int) -> bool:
        return self.prepare_restore(sequence, position) == position

    def prepare_restore(self, sequence: int, position: int) -> int:
        """Where the last image before is not the one stored, back to that image's token, which encodes it again."""
        position = min(position, self.length(sequence))
        for encoded in reversed(self._encoded[sequence]):
            if encoded.position < position and encoded.position != self._stored[sequence]:
                position = encoded.position
            elif encoded.position < position:
                break
        return position

    def remove(self, sequence: int, begin: int, end: int | None = None, *, n_positions: int = 0) -> None:
        self._n_ahead[sequence] = 0
        if end is not None and begin < end < self.length(sequence):
            self._move(sequence, begin, end)
        elif end is None or begin < end:
            begin = min(begin, self.length(sequence))
            self._forget(sequence, begin if self.can_resume(sequence, begin) else 0)

    def _forget(self, sequence: int, begin: int) -> None:
        self._n_ahead[sequence] = 0
        self._encoded[sequence] = [e for e in self._encoded[sequence] if e.position < begin]
        if self._stored[sequence] >= begin:
            self._stored[sequence] = NONE
        self._lengths[sequence] = min(self._lengths[sequence], begin)

    def _move(self, sequence: int, begin: int, end: int) -> None:
        """Take out positions in the middle; what is stored stays, unless its token goes."""
        stored = int(self._stored[sequence])
        kept = [e for e in self._encoded[sequence] if not begin <= e.position < end]
        moved = [Encoded(sequence, e.position - (end - begin if e.position >= end else 0), e.n_rows) for e in kept]
        self._encoded[sequence] = moved
        if begin <= stored < end:
            self._stored[sequence] = NONE
            # What an earlier image gave is gone too, so later tokens go on without any.
            self._encoded[sequence] = []
        elif stored >= end:
            self._stored[sequence] = stored - (end - begin)
        self._lengths[sequence] -= end - begin

    def check_remove(self, sequence: int, begin: int, end: int) -> None:
        """Keys of images do not turn with positions: any range can go."""

    def length(self, sequence: int) -> int:
        return int(self._lengths[sequence])

    def check_integrity(self) -> None:
        for sequence, encoded in enumerate(self._encoded):
            positions = [e.position for e in encoded]
            assert positions == sorted(set(positions)), f"images of sequence {sequence} are out of order: {positions}"
            assert not positions or positions[-1] < self.length(sequence), f"sequence {sequence} sees an image to come"
            stored = int(self._stored[sequence])
            n_ahead = self.n_ahead(sequence)
            assert 0 <= n_ahead <= self._n_encoded
            is_known = stored == (positions[-1] if positions else NONE)
            assert is_known or stored == NONE, f"sequence {sequence} stores {stored} of {positions}"
            assert not n_ahead or stored == NONE, f"sequence {sequence} stores {stored} where an image to come is"
            assert all(0 < e.n_rows <= self._n_encoded for e in encoded)
