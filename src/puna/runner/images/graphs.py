"""A family's encoder as graphs over any part of its layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from puna.ml.backend import Context
from puna.ml.ggml.backend import GGMLBackend
from puna.ml.tensor import DType, Tensor
from puna.runner.images.encoding import States
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


class GraphEncoder:
    """Builds a graph for each part; one at a time, so that they share their working memory."""

    def __init__(self, backend: GGMLBackend, vision: VisionModel) -> None:
        self.n_layers = max(vision.n_layers, 1)
        self._backend = backend
        self._vision = vision
        self._max_nodes = vision.max_nodes() + _INPUTS

    def run(self, piece: Piece, states: States | None, begin: int, end: int) -> States | None:
        ctx = self._backend.context(self._max_nodes)
        try:
            given, inputs, results = self._build(ctx, piece, states, begin, end)
            ctx.allocate()
            for name, tensor in inputs.made.items():
                ctx.set(tensor, np.ascontiguousarray(piece.arrays[name]))
            for tensor, values in zip(given, states or (), strict=True):
                ctx.set(tensor, values)
            if not ctx.compute():
                return None
            return [self._read(ctx, tensor) for tensor in results]
        finally:
            ctx.close()

    def _build(
        self, ctx: Context, piece: Piece, states: States | None, begin: int, end: int
    ) -> tuple[list[Tensor], _Inputs, list[Tensor]]:
        inputs = _Inputs(ctx, piece)
        given: list[Tensor] = []
        if states is None:
            state: State = self._vision.begin(ctx, inputs)
        else:
            given = [ctx.input(DType.F32, *reversed(values.shape)) for values in states]
            state = tuple(given)
        for index in range(begin, min(end, self._vision.n_layers)):
            state = self._vision.layer(ctx, state, inputs, index)
        results = [self._vision.end(ctx, state, inputs)] if end == self.n_layers else list(state)
        results = [result.contiguous() for result in results]
        for result in results:
            ctx.output(result)
        for tensor in (*given, *inputs.made.values()):
            ctx.forward(tensor)  # gets memory, even where nothing depends on it
        return given, inputs, results

    def _read(self, ctx: Context, tensor: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        shape = tuple(reversed(_without_ones(tensor.shape)))
        out = np.empty(shape, np.float32)
        ctx.get(tensor, out)
        return out

    def reserve_sizes(self, largest: Prepared) -> list[int]:
        """Bytes of working memory per device for the largest image, computed in one part or in several."""
        found: list[list[int]] = []
        for piece, states, begin, end in self._extremes(largest):
            ctx = self._backend.context(self._max_nodes)
            try:
                self._build(ctx, piece, states, begin, end)
                found.append(self._backend.reserve_sizes(ctx))
            finally:
                ctx.close()
        return [max(sizes) for sizes in zip(*found, strict=True)]

    def reserve(self, largest: Prepared) -> None:
        """Take it. Errors: OutOfMemory."""
        for piece, states, begin, end in self._extremes(largest):
            ctx = self._backend.context(self._max_nodes)
            try:
                self._build(ctx, piece, states, begin, end)
                ctx.reserve()
            finally:
                ctx.close()

    def _extremes(self, largest: Prepared) -> Iterator[tuple[Piece, States | None, int, int]]:
        """Of each shape of piece, all layers at once, and the last alone."""
        for piece in {piece.key: piece for piece in largest.pieces}.values():
            yield piece, None, 0, self.n_layers
            states = self._states_between(piece)
            if states is not None:
                yield piece, states, self.n_layers - 1, self.n_layers

    def _states_between(self, piece: Piece) -> States | None:
        """What the last layer is given: zeros of its shapes."""
        if self.n_layers < 2:
            return None
        ctx = self._backend.context(self._max_nodes)
        try:
            _, _, results = self._build(ctx, piece, None, 0, self.n_layers - 1)
            return [np.zeros(tuple(reversed(_without_ones(result.shape))), np.float32) for result in results]
        finally:
            ctx.close()


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without the last dimensions that are 1, but for the first."""
    n = max((i + 1 for i, size in enumerate(shape) if size != 1), default=1)
    return tuple(shape[:n])
