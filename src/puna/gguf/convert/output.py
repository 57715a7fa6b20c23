"""From a checkpoint's tensors to those of a GGUF file: shapes checked first, data moved part by part when it is written.

Matrices keep 16 bits where they have them and become F16 otherwise; all else becomes F32. What is in MXFP4 stays so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from puna.errors import FileFormatError, UnsupportedModel
from puna.gguf.convert.checkpoint import OnBytes, Tensors
from puna.gguf.convert.encodings import Weights, mxfp4_shape
from puna.gguf.types import TensorType
from puna.gguf.writer import GGUFWriter

FILE_TYPE_F16, FILE_TYPE_BF16, FILE_TYPE_MXFP4 = 1, 32, 38  # general.file_type as llama.cpp numbers it

Rows = npt.NDArray[Any]
Change = Callable[[Rows], Rows]


def unchanged(rows: Rows) -> Rows:
    return rows


def file_type(tensors: Tensors, matrix: str) -> int:
    """What a file is whose matrices are stored as this one is.

    Errors: FileFormatError when there is no such tensor.
    """
    return FILE_TYPE_BF16 if tensors.stored(matrix).dtype == "BF16" else FILE_TYPE_F16


@dataclass(frozen=True)
class Piece:
    """A tensor of the GGUF file, of these tensors of the checkpoint."""

    name: str
    sources: Sequence[str]
    shape: tuple[int, ...]  # of each source, in numpy's order
    result: tuple[int, ...]  # of what the change gives
    change: Change = unchanged  # of each source
    is_stack: bool = False  # the sources' results one after another, along an axis of their own
    is_exact: bool = False  # in F32, also if it is a matrix
    computes: bool = False  # the change calculates, so that it needs the numbers themselves


class Output:
    """Declares tensors with a writer, then writes the file."""

    def __init__(self, writer: GGUFWriter, weights: Weights) -> None:
        self._writer = writer
        self._weights = weights
        self._n_done = 0
        self._n_bytes = 0
        self._on_bytes: OnBytes | None = None

    def add(self, piece: Piece) -> None:
        """Errors: FileFormatError naming file and tensor when one is missing, of another shape, or of no usable numbers."""
        whole = (len(piece.sources), *piece.result) if piece.is_stack else piece.result
        dtypes = {source: self._weights.take(source, piece.shape) for source in piece.sources}
        dtype = dtypes[piece.sources[0]]
        for source, other in dtypes.items():
            if other != dtype:
                home = self._weights.tensors.home(source)
                raise FileFormatError(f"{home.name}: tensor {source} is stored otherwise than {piece.sources[0]}")
        matrix = TensorType.BF16 if dtype == "BF16" else TensorType.F16
        kind = TensorType.F32 if len(whole) < 2 or piece.is_exact else matrix
        self._declare(piece.name, whole, kind, lambda: self._parts(piece, kind, dtype))

    def add_blocks(self, name: str, source: str, shape: tuple[int, ...], result: tuple[int, ...], change: Change) -> None:
        """A tensor in MXFP4 from one of this shape; *change* and *result* are those of its bytes by block and of its numbers.

        Errors: as add.
        """
        self._weights.take_blocks(source, shape)

        def parts() -> Iterator[Rows]:
            blocks = np.ascontiguousarray(change(self._weights.blocks(source)))
            if blocks.shape != mxfp4_shape(result):
                raise ValueError(f"tensor {name!r} became {blocks.shape}")
            yield self._counted(blocks)

        self._declare(name, result, TensorType.MXFP4, parts)

    def _declare(self, name: str, shape: tuple[int, ...], kind: TensorType, parts: Callable[[], Iterator[Rows]]) -> None:
        self._writer.add_raw_tensor(name, tuple(reversed(shape)), kind, parts)
        self._n_bytes += kind.n_bytes(prod(shape))

    def _parts(self, piece: Piece, kind: TensorType, dtype: str) -> Iterator[Rows]:
        is_kept = kind.name == dtype and not piece.computes
        for source in piece.sources:
            rows = self._weights.raw(source) if is_kept else self._weights.floats(source)
            rows = piece.change(rows)
            if not is_kept:
                rows = _rounded(rows, kind, source)
            if rows.shape != piece.result:
                raise ValueError(f"tensor {piece.name!r} became {rows.shape}, not {piece.result}")
            yield self._counted(np.ascontiguousarray(rows))

    def write(self, target: Path, on_bytes: OnBytes) -> None:
        """Errors: UnsupportedModel naming a tensor whose values 16 bits cannot hold; what *on_bytes* raises."""
        self._on_bytes = on_bytes
        self._writer.write(target)

    def _counted(self, rows: Rows) -> Rows:
        self._n_done += rows.nbytes
        if self._on_bytes is not None:
            self._on_bytes(min(self._n_done, self._n_bytes), self._n_bytes)
        return rows


def _rounded(values: npt.NDArray[np.float32], kind: TensorType, name: str) -> Rows:
    if kind is TensorType.F32:
        return values.astype(np.float32, copy=False)
    if kind is TensorType.BF16:
        return bfloat16(values)
    if np.abs(values).max(initial=0.0) > np.finfo(np.float16).max:
        raise UnsupportedModel(f"tensor {name} has values that a 16-bit number cannot hold")
    return values.astype(np.float16)


def bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper halves of the numbers, rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
