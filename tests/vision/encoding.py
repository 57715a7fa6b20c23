"""A family's eyes at work without a runner: opened, an image prepared, and its rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from puna.gguf.reader import GGUFFile
from puna.ml.backend import Context
from puna.ml.ggml.backend import GGMLBackend
from puna.ml.tensor import DType, Tensor
from puna.tokenizer.tokenizer import Tokenizer
from puna.vision.look import LookAtOnce
from puna.vision.model import Piece, Pixels, Prepared, VisionModel
from puna.vision.registry import open_vision

Floats = npt.NDArray[np.float32]

_TYPES = {np.dtype(np.float32): DType.F32, np.dtype(np.int32): DType.I32}


class Inputs(Mapping[str, Tensor]):
    """The tensors of a piece's arrays: those that a graph asks for."""

    def __init__(self, ctx: Context, piece: Piece) -> None:
        self._ctx, self._piece = ctx, piece
        self._made: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._made:
            array = self._piece.arrays[name]
            self._made[name] = self._ctx.input(_TYPES[array.dtype], *array.shape[::-1])
            self._ctx.forward(self._made[name])  # gets memory, even where only its shape is asked for
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._piece.arrays)

    def __len__(self) -> int:
        return len(self._piece.arrays)

    def set(self) -> None:
        for name, tensor in self._made.items():
            self._ctx.set(tensor, np.ascontiguousarray(self._piece.arrays[name]))


class Eyes:
    """Errors of opening are the registry's."""

    def __init__(self, path: Path, text: Path, **options: Any) -> None:
        """*path*: a projector's own file, or *text* again where that holds both; *options* as the backend's."""
        self.file, self.text = GGUFFile.open(path), GGUFFile.open(text)
        self.tokenizer = Tokenizer(text)
        self.backend = GGMLBackend(self.file, n_threads=2, **options)
        self.model: VisionModel = open_vision(self.file, self.backend, self.text, self.tokenizer)
        self.backend.allocate()
        self.backend.load(lambda _share: None)

    def rows(self, pixels: Pixels, *, at_once: bool = True) -> Floats:
        """All rows of an image, [n_rows, n_out]; with *at_once* false each layer in a graph of its own."""
        prepared = self.model.prepare(pixels)
        found = self.numbered(prepared, at_once=at_once)
        placed = [row for row in prepared.placed.rows if row >= 0]
        # As they stand, where each of them does.
        return found[placed] if sorted(placed) == list(range(len(found))) else found

    def numbered(self, prepared: Prepared, *, at_once: bool = True) -> Floats:
        """As the image's places number them."""
        return np.concatenate([self.encoded(piece) if at_once else self._cut(piece) for piece in prepared.pieces])

    def encoded(self, piece: Piece) -> Floats:
        context = self.backend.context(self.model.max_nodes())
        inputs = Inputs(context, piece)
        state = self.model.begin(context, inputs)
        for index in range(self.model.n_layers):
            state = self.model.layer(LookAtOnce(context), state, inputs, index)
        result = self.model.end(context, piece.used(state), inputs)
        context.output(result)
        inputs.set()
        assert context.compute()
        found = context.values(result).copy()
        context.close()
        return found

    def _cut(self, piece: Piece) -> Floats:
        kept: list[Floats] = []

        def graph(build: Any) -> list[Floats]:
            context = self.backend.context(self.model.max_nodes())
            inputs = Inputs(context, piece)
            given = [context.input(DType.F32, *array.shape[::-1]) for array in kept]
            # What a layer only hands on is an input, whose memory is reused.
            results = [result.contiguous() for result in build(context, tuple(given), inputs)]
            for result in results:
                context.output(result)
            inputs.set()
            for tensor, array in zip(given, kept, strict=True):
                context.set(tensor, array)
            assert context.compute()
            found = []
            for result in results:
                values = np.empty(result.shape[::-1], np.float32)
                context.get(result, values)
                found.append(values)
            context.close()
            return found

        m = self.model
        kept = graph(lambda ctx, _state, inputs: m.begin(ctx, inputs))
        for index in range(m.n_layers):
            kept = graph(lambda ctx, state, inputs, index=index: m.layer(LookAtOnce(ctx), state, inputs, index))
        (rows,) = graph(lambda ctx, state, inputs: [m.end(ctx, piece.used(state), inputs)])
        return rows.reshape(-1, m.n_out)

    def close(self) -> None:
        self.backend.close()
        self.tokenizer.close()
        self.file.close()
        self.text.close()


@contextmanager
def opened_eyes(path: Path, text: Path, **options: Any) -> Iterator[Eyes]:
    eyes = Eyes(path, text, **options)
    try:
        yield eyes
    finally:
        eyes.close()


def picture(width: int, height: int, seed: int = 0) -> Pixels:
    """Waves of several lengths in all colours, and noise: resized wrongly, it looks otherwise."""
    random = np.random.default_rng([width, height, seed])
    rows, columns = (np.minimum(np.arange(side) * 200 // max(width, height), side - 1) for side in (height, width))
    y, x = np.mgrid[: rows[-1] + 1, : columns[-1] + 1] / 200
    waves = [np.sin(2 * np.pi * (f * x + g * y)) for f, g in random.uniform(-6, 6, (6, 2))]
    colours = np.stack([waves[0] + waves[1], waves[2] + waves[3], waves[4] + waves[5]], -1)
    values: Pixels = (100 + 40 * colours).astype(np.uint8)
    found: Pixels = values[rows[:, None], columns] + random.integers(0, 50, (height, width, 3), np.uint8)
    return found


def difference(found: Floats, expected: Floats) -> float:
    """Normalised: of the lengths of all rows together."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
