"""A family's encoder as graphs over any part of its layers, and of a layer over any of its rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from puna.ml.backend import Context, row_bytes
from puna.ml.ggml.backend import GGMLBackend
from puna.ml.tensor import DType, Tensor
from puna.runner.images.course import Array, States
from puna.vision.look import Group, LookAtOnce, attention_ranges, scoring
from puna.vision.model import Piece, Prepared, State, VisionModel

_INPUTS = 64  # nodes of inputs and of copies of what a part begins and ends with


class _Inputs(Mapping[str, Tensor]):
    """A piece's arrays as inputs of a graph: those that it asks for are made, the others take nothing."""

    def __init__(self, ctx: Context, piece: Piece) -> None:
        self.made: dict[str, Tensor] = {}
        self._ctx = ctx
        self._piece = piece

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.made:
            array = self._piece.arrays[name]
            dtype = DType.I32 if array.dtype == np.int32 else DType.F32
            self.made[name] = self._ctx.input(dtype, *reversed(array.shape))
        return self.made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._piece.arrays

    def __iter__(self) -> Iterator[str]:
        return iter(self._piece.arrays)

    def __len__(self) -> int:
        return len(self._piece.arrays)


class _LookFor:
    """Notes what the rows of a layer look for, and stores what they are found by and give."""

    def __init__(self, keep: Callable[[Tensor, Tensor], None]) -> None:
        self.query: Tensor | None = None
        self.groups: Sequence[Group] | None = None
        self._keep = keep

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        groups: Sequence[Group] | None = None,
        *,
        scale: float = 0.0,
        dtype: DType = DType.F16,
    ) -> Tensor:
        self.query, self.groups = query.contiguous(), groups
        self._keep(key, value)
        return self.query.flatten()  # in the place of what nobody computes


class _Looked:
    """Has some rows look at what was stored of all."""

    def __init__(self, ctx: Context, wanted: Tensor, begin: int, kept: tuple[Tensor, Tensor]) -> None:
        self._ctx = ctx
        self._wanted = wanted
        self._begin = begin
        self._kept = kept

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        groups: Sequence[Group] | None = None,
        *,
        scale: float = 0.0,
        dtype: DType = DType.F16,
    ) -> Tensor:
        ranges = attention_ranges(groups, self._begin, self._begin + self._wanted.shape[2], *self._kept)
        return self._ctx.attention(self._wanted, ranges, scoring(self._wanted, scale))


# What is given to a graph, and what it computes.
Built = tuple[list[tuple[Tensor, Array]], list[Tensor]]


class GraphEncoder:
    """Builds a graph for each part; one at a time, so that they share their working memory."""

    def __init__(self, backend: GGMLBackend, vision: VisionModel, largest: Prepared) -> None:
        """Before the backend allocates."""
        self.n_layers = max(vision.n_layers, 1)
        self._backend = backend
        self._vision = vision
        self._largest = {piece.key: piece for piece in largest.pieces}
        self._max_nodes = vision.max_nodes() + _INPUTS
        # Of the rows of a piece, keys and values of one layer.
        self._n_kept = max((piece.divided.n for piece in largest.pieces if piece.divided), default=0)
        n = self._n_kept * vision.kept.head_dim * vision.kept.n_heads
        self._kept = [backend.storage(0, vision.kept.dtype, n) for _ in range(2)] if n else []

    @property
    def host_bytes(self) -> int:
        """Between two parts of a layer: rows, and what they look for."""
        return 2 * 4 * self._n_kept * self._vision.kept.head_dim * self._vision.kept.n_heads

    # Whole layers.

    def run(self, piece: Piece, states: States | None, begin: int, end: int) -> States | None:
        return self._computed(piece, lambda ctx, inputs: self._build(ctx, inputs, piece, states, begin, end))

    def _build(
        self, ctx: Context, inputs: Mapping[str, Tensor], piece: Piece, states: States | None, begin: int, end: int
    ) -> Built:
        if states is None:
            given: list[Tensor] = []
            state: State = self._vision.begin(ctx, inputs)
        else:
            given = [ctx.input(DType.F32, *reversed(values.shape)) for values in states]
            state = tuple(given)
        look = LookAtOnce(ctx)
        for index in range(begin, min(end, self._vision.n_layers)):
            state = self._vision.layer(look, state, inputs, index)
        if end == self.n_layers:
            state = (self._vision.end(ctx, piece.used(state), inputs),)
        return list(zip(given, states or (), strict=True)), list(state)

    # Some rows.

    def by_rows(self, piece: Piece) -> GraphEncoder | None:
        return self if piece.divided and self._kept and piece.divided.n <= self._n_kept else None

    def begin_rows(self, piece: Piece, begin: int, end: int) -> States | None:
        some = piece.some(begin, end)
        return self._computed(some, lambda ctx, inputs: ([], list(self._vision.begin(ctx, inputs))))

    def look_for(self, piece: Piece, rows: Array, index: int, begin: int) -> tuple[Array, Hashable] | None:
        n, end = _n(piece), begin + len(rows)
        head_dim, n_heads, _ = self._vision.kept
        sights: list[Hashable] = []

        def build(ctx: Context, inputs: Mapping[str, Tensor]) -> Built:
            def keep(key: Tensor, value: Tensor) -> None:
                for new, whole in zip((key, value), self._kept_of(ctx, n), strict=True):
                    part = whole.view((whole.shape[0], len(rows), whole.shape[2]), whole.strides[1:3], begin * whole.strides[1])
                    ctx.forward(new.permute(0, 2, 1, 3).copy_to(part))

            look, given = _LookFor(keep), self._given(ctx, rows)
            self._vision.layer(look, (given,), inputs, index)
            assert look.query is not None
            sights.append("all" if look.groups is None else "groups")
            return [(given, rows)], [look.query]

        found = self._computed(piece.some(begin, end), build)
        return None if found is None else (found[0].reshape(len(rows), n_heads, head_dim), sights[0])

    def looked(self, piece: Piece, rows: Array, wanted: Array, index: int, begin: int) -> States | None:
        n = _n(piece)

        def build(ctx: Context, inputs: Mapping[str, Tensor]) -> Built:
            given, query = self._given(ctx, rows), self._given(ctx, wanted)
            look = _Looked(ctx, query, begin, self._kept_of(ctx, n))
            return [(given, rows), (query, wanted)], list(self._vision.layer(look, (given,), inputs, index))

        return self._computed(piece.some(begin, begin + len(rows)), build)

    def end_rows(self, piece: Piece, states: States, begin: int, end: int) -> Array | None:
        def build(ctx: Context, inputs: Mapping[str, Tensor]) -> Built:
            given = [self._given(ctx, values) for values in states]
            return list(zip(given, states, strict=True)), [self._vision.end(ctx, tuple(given), inputs)]

        found = self._computed(piece.some(begin, end), build)
        return None if found is None else found[0]

    def _given(self, ctx: Context, values: Array) -> Tensor:
        return ctx.input(DType.F32, *reversed(values.shape))

    def _kept_of(self, ctx: Context, n: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a piece's n rows, [head_dim, n, n_heads]: a head's lie together."""
        head_dim, n_heads, dtype = self._vision.kept
        row = row_bytes(dtype, head_dim)
        keys, values = (ctx.use(whole).view((head_dim, n, n_heads), (row, n * row), 0) for whole in self._kept)
        return keys, values

    # Graphs.

    def _computed(self, piece: Piece, build: Callable[[Context, Mapping[str, Tensor]], Built]) -> list[Array] | None:
        """What it gives, columns as rows; None when it was aborted."""
        ctx = self._backend.context(self._max_nodes)
        try:
            given, inputs, results = self._planned(ctx, piece, build)
            ctx.allocate()
            for name, tensor in inputs.made.items():
                ctx.set(tensor, np.ascontiguousarray(piece.arrays[name]))
            for tensor, values in given:
                ctx.set(tensor, np.ascontiguousarray(values))
            if not ctx.compute():
                return None
            return [self._read(ctx, tensor) for tensor in results]
        finally:
            ctx.close()

    def _planned(
        self, ctx: Context, piece: Piece, build: Callable[[Context, Mapping[str, Tensor]], Built]
    ) -> tuple[list[tuple[Tensor, Array]], _Inputs, list[Tensor]]:
        inputs = _Inputs(ctx, piece)
        given, results = build(ctx, inputs)
        results = [result.contiguous() for result in results]
        for result in results:
            ctx.output(result)
        for tensor in (*(tensor for tensor, _ in given), *inputs.made.values()):
            # Gets memory, even where nothing depends on it: of an input that no operation has, the library would not see that
            # it is larger than in the graph before.
            ctx.forward(tensor.view((1,), (), 0))
        return given, inputs, results

    def _read(self, ctx: Context, tensor: Tensor) -> Array:
        n_in, *n = tensor.shape
        out = np.empty((math.prod(n), n_in), np.float32)
        ctx.get(tensor, out)
        return out

    # Memory.

    def reserve_sizes(self) -> list[int]:
        """Bytes of working memory per device for the largest image, computed in one part or in several."""
        found: list[list[int]] = []
        for piece, build in self._extremes():
            ctx = self._backend.context(self._max_nodes)
            try:
                self._planned(ctx, piece, build)
                found.append(self._backend.reserve_sizes(ctx))
            finally:
                ctx.close()
        return [max(sizes) for sizes in zip(*found, strict=True)]

    def reserve(self) -> None:
        """Take it, once. Errors: OutOfMemory."""
        for piece, build in self._extremes():
            ctx = self._backend.context(self._max_nodes)
            try:
                self._planned(ctx, piece, build)
                ctx.reserve()
            finally:
                ctx.close()
        self._largest = {}

    def _extremes(self) -> Iterator[tuple[Piece, Callable[[Context, Mapping[str, Tensor]], Built]]]:
        """Of each shape of piece, all layers at once, and the last alone."""
        for piece in self._largest.values():
            yield piece, partial(self._built, piece, None, 0)
            states = self._states_between(piece)
            if states is not None:
                yield piece, partial(self._built, piece, states, self.n_layers - 1)

    def _built(self, piece: Piece, states: States | None, begin: int, ctx: Context, inputs: Mapping[str, Tensor]) -> Built:
        return self._build(ctx, inputs, piece, states, begin, self.n_layers)

    def _states_between(self, piece: Piece) -> States | None:
        """What the last layer is given: zeros of its shapes."""
        if self.n_layers < 2:
            return None
        ctx = self._backend.context(self._max_nodes)
        try:
            _, results = self._build(ctx, _Inputs(ctx, piece), piece, None, 0, self.n_layers - 1)
            return [np.zeros(tuple(reversed(result.shape[:2])), np.float32) for result in results]
        finally:
            ctx.close()


def _n(piece: Piece) -> int:
    assert piece.divided is not None
    return piece.divided.n
