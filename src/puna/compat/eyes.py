"""What libllama's models see and hear through libmtmd: every projector that it knows, as the runner knows eyes.

What stands around a picture, how it is cut, which of its rows see each other and where they stand along the axes of M-RoPE is
what libmtmd says of a prompt that is the picture alone. Its encoder runs as a whole, a tile at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from puna.compat.failures import why, why_no_eyes
from puna.compat.trial import Facts
from puna.errors import BadRequest, LoadError, PunaError, UnsupportedModel
from puna.native.decoder import Model
from puna.native.log import captured
from puna.native.projector import MARKER, Chunk, Chunks, Medium, Projector
from puna.vision.model import Piece, Pixels, Placed, Prepared, Range

# Beyond what any picture is: libmtmd's resizing ends the process where a side becomes nothing.
MAX_ASPECT = 200
PLACEHOLDER = 0  # the token that is counted where a row stands


class LlamaEyes:
    """Of a model whose text part may be computed by anybody: libmtmd asks it for its vocabulary and its sizes alone.

    Nothing is opened before ``open``; until then what is known is what a trial has found (puna.compat.trial).
    """

    n_layers = 1
    is_cross_attended = False

    def __init__(self, text: Path, path: Path, facts: Facts) -> None:
        if not (facts.sees or facts.hears):
            raise UnsupportedModel(f"{path}: this projector neither sees nor hears")
        self.text = text
        self.path = path
        self.facts = facts
        self.n_out = facts.n_out
        self.sample_rate = max(facts.sample_rate, 0) if facts.hears else 0
        self._model: Model | None = None
        self._projector: Projector | None = None
        self._begun: tuple[npt.NDArray[Any], Chunks] | None = None  # the medium under way, for its next piece

    def open(self, n_threads: int, device: int = 0) -> None:
        """On a device, or with so many threads of the CPU.

        Errors: LoadError, OutOfMemory, UnsupportedModel saying why libllama or libmtmd refuses.
        """
        with captured() as lines:
            self._model = Model.load(str(self.text), is_dry=True)
        if self._model is None:
            raise why(str(self.text), lines)
        with captured() as lines:
            self._projector = Projector.load(str(self.path), self._model.address, n_threads=n_threads, device=device)
        if self._projector is None:
            raise why_no_eyes(str(self.path), lines)
        if self._projector.n_out != self.n_out:
            raise LoadError(f"{self.path} has changed since it was tried")

    @property
    def projector(self) -> Projector:
        assert self._projector is not None, "open comes first"
        return self._projector

    def close(self) -> None:
        self._begun = None
        if self._projector is not None:
            self._projector.close()
            self._projector = None
        if self._model is not None:
            self._model.close()
            self._model = None

    # Before it is encoded; any thread.

    def size(self, width: int, height: int) -> tuple[int, int]:
        self._check(width, height)
        chunks = self._chunks(Medium.blank(width, height))
        n_rows = sum(chunk.n_tokens for chunk in chunks if chunk.kind != "text")
        return n_rows, sum(chunk.n_tokens for chunk in chunks)

    def largest(self) -> tuple[int, int]:
        return self.facts.largest

    def prepare(self, pixels: Pixels) -> Prepared:
        height, width, _ = pixels.shape
        self._check(width, height)
        return self._prepared("pixels", pixels)

    def prepare_sound(self, samples: npt.NDArray[np.float32]) -> Prepared:
        if not self.sample_rate:
            raise BadRequest("the model sees, and does not hear")
        return self._prepared("samples", samples)

    def _check(self, width: int, height: int) -> None:
        """Errors: BadRequest."""
        if not self.facts.sees:
            raise BadRequest("the model hears, and does not see")
        if min(width, height) < 1 or max(width, height) > MAX_ASPECT * min(width, height):
            sides = f"its sides may differ by a factor of {MAX_ASPECT}, and not be 0"
            raise BadRequest(f"an image of {width} x {height} pixels: {sides}")

    def _prepared(self, name: str, medium: npt.NDArray[Any]) -> Prepared:
        chunks = self._chunks(_medium(name, medium))
        media = [i for i, chunk in enumerate(chunks) if chunk.kind != "text"]
        pieces = [Piece({name: medium, "chunk": np.array([i], np.int32)}) for i in media]
        return Prepared(pieces, placed(self.projector, chunks), sum(chunks[i].n_tokens for i in media))

    def _chunks(self, medium: Medium) -> Chunks:
        with captured() as lines:
            found = self.projector.tokenize(MARKER, [medium])
        if found is None or all(chunk.kind == "text" for chunk in found):
            said = next((line.text for line in reversed(lines) if line.is_complaint), "it did not say why")
            raise BadRequest(f"libmtmd cannot take it: {said}")
        return found

    # The encoder; one thread.

    def by_rows(self, piece: Piece) -> None:
        """It can only be run as a whole."""

    def run(self, piece: Piece, states: Any, begin: int, end: int) -> Sequence[npt.NDArray[np.float32]] | None:
        """Its rows [n, n_out], alone.

        Errors: PunaError where libmtmd fails.
        """
        (name,) = piece.arrays.keys() - {"chunk"}
        medium = piece.arrays[name]
        if self._begun is None or self._begun[0] is not medium:
            self._begun = medium, self._chunks(_medium(name, medium))
        chunks = self._begun[1]
        index = int(piece.arrays["chunk"][0])
        with captured() as lines:
            rows = self.projector.encode(chunks[index])
        if not any(chunk.kind != "text" for chunk in chunks[index + 1 :]):
            self._begun = None
        if rows is None:
            said = next((line.text for line in reversed(lines) if line.is_complaint), "it did not say why")
            raise PunaError(f"libmtmd could not encode {name}: {said}")
        return [rows]


def _medium(name: str, values: npt.NDArray[Any]) -> Medium:
    return Medium.image(values) if name == "pixels" else Medium.audio(values)


def placed(projector: Projector, chunks: Sequence[Chunk]) -> Placed:
    """How what a medium became stands in a sequence.

    Errors: UnsupportedModel for positions that are not counted from where the picture begins.
    """
    tokens: list[int] = []
    rows: list[int] = []
    both_ways: list[Range] = []
    n_rows = n_positions = 0
    axes: list[npt.NDArray[np.int32]] = []
    for chunk in chunks:
        first = len(tokens)
        if chunk.kind == "text":
            tokens += chunk.tokens
            rows += [-1] * chunk.n_tokens
        else:
            tokens += [PLACEHOLDER] * chunk.n_tokens
            rows += range(n_rows, n_rows + chunk.n_tokens)
            n_rows += chunk.n_tokens
            if projector.sees_both_ways(chunk):
                both_ways.append((first, len(tokens)))
        if projector.has_axes:
            axes.append(_axes(chunk, n_positions))
        n_positions += chunk.n_positions
    whole = np.concatenate(axes, axis=1) if axes else None
    return Placed(tokens, rows, together=both_ways, bidirectional=both_ways, axes=whole, n_positions=n_positions)


def _axes(chunk: Chunk, first: int) -> npt.NDArray[np.int32]:
    """[4, n] of a chunk whose first position is *first*."""
    found = chunk.positions(first)
    if found is None:  # text and sound go along the first three at once
        along = np.arange(first, first + chunk.n_tokens, dtype=np.int32)
        return np.stack([along, along, along, np.zeros_like(along)])
    further = chunk.positions(first + 1)
    assert further is not None
    if (further[:3] - found[:3] != 1).any() or (further[3] != found[3]).any():
        raise UnsupportedModel("positions of pictures that are not counted from where they begin are not supported")
    return found
