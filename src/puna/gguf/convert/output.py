"""From a checkpoint's tensors to those of a GGUF file: shapes checked first, data moved tensor by tensor when it is written.

Matrices keep 16 bits where they have them and become F16 otherwise; all else becomes F32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from puna.errors import FileFormatError, UnsupportedModel
from puna.gguf.convert.checkpoint import OnBytes, Tensors
from puna.gguf.types import TensorType
from puna.gguf.writer import GGUFWriter

FILE_TYPE_F16, FILE_TYPE_BF16 = 1, 32  # general.file_type as llama.cpp numbers it

Rows = npt.NDArray[Any]


def unchanged(rows: Rows) -> Rows:
    return rows


def file_type(tensors: Tensors, matrix: str) -> int:
    """What a file is whose matrices are stored as this one is.

    Errors: FileFormatError when there is no such tensor.
    """
    return FILE_TYPE_BF16 if tensors.stored(matrix).dtype == "BF16" else FILE_TYPE_F16


class Output:
    """Declares tensors with a writer, then writes the file."""

    def __init__(self, writer: GGUFWriter, tensors: Tensors) -> None:
        self._writer = writer
        self._tensors = tensors
        self._n_done = 0
        self._n_bytes = 0
        self._on_bytes: OnBytes | None = None

    def add(
        self,
        name: str,
        source: str,
        shape: tuple[int, ...],
        rearrange: Callable[[Rows], Rows] = unchanged,
        *,
        is_exact: bool = False,
    ) -> None:
        """Tensor *name* of the file from tensor *source* of the checkpoint, of this shape in numpy's order.

        With *is_exact* a matrix becomes F32 too. *rearrange* changes the order of rows.
        Errors: FileFormatError naming file and tensor when it is missing, of another shape, or not of floating point numbers.
        """
        kind = TensorType.F32 if is_exact else self._kind(source, shape)
        self._check(source, shape)
        self._n_bytes += kind.n_bytes(int(np.prod(shape)))
        self._writer.add_raw_tensor(
            name, tuple(reversed(shape)), kind, lambda: np.ascontiguousarray(rearrange(self._rows(source, kind)))
        )

    def add_stack(self, name: str, sources: Sequence[str], shape: tuple[int, ...]) -> None:
        """Tensor *name* of the file from matrices of this shape each, one after another: those of experts.

        Errors: as add.
        """
        kind = self._kind(sources[0], shape)
        for source in sources:
            self._check(source, shape)
            if self._kind(source, shape) is not kind:
                raise FileFormatError(f"{self._tensors.home(source).name}: tensor {source} is stored otherwise than {sources[0]}")
        whole = (len(sources), *shape)
        self._n_bytes += kind.n_bytes(int(np.prod(whole)))
        self._writer.add_raw_tensor(
            name, tuple(reversed(whole)), kind, lambda: np.stack([self._rows(source, kind) for source in sources])
        )

    def _check(self, source: str, shape: tuple[int, ...]) -> None:
        file, stored = self._tensors.home(source), self._tensors.stored(source)
        if stored.shape != shape or not all(shape):
            raise FileFormatError(
                f"{file.name}: tensor {source} has the shape {list(stored.shape)}, the configuration calls for {list(shape)}"
            )
        file.check_floats(source)

    def _kind(self, source: str, shape: tuple[int, ...]) -> TensorType:
        if len(shape) < 2:
            return TensorType.F32
        return TensorType.BF16 if self._tensors.stored(source).dtype == "BF16" else TensorType.F16

    def _rows(self, source: str, kind: TensorType) -> Rows:
        file, dtype = self._tensors.home(source), self._tensors.stored(source).dtype
        is_kept = kind.name == dtype and kind is not TensorType.F32
        rows = file.raw(source) if is_kept else file.floats(source)
        if kind is TensorType.F16 and not is_kept:
            rows = _halved(rows, source)
        self._count(rows.nbytes)
        return rows

    def write(self, target: Path, on_bytes: OnBytes) -> None:
        """Errors: UnsupportedModel naming a tensor whose values 16 bits cannot hold; what *on_bytes* raises."""
        self._on_bytes = on_bytes
        self._writer.write(target)

    def _count(self, n_bytes: int) -> None:
        self._n_done += n_bytes
        if self._on_bytes is not None:
            self._on_bytes(min(self._n_done, self._n_bytes), self._n_bytes)


def _halved(values: npt.NDArray[np.float32], name: str) -> npt.NDArray[np.float16]:
    if np.abs(values).max(initial=0.0) > np.finfo(np.float16).max:
        raise UnsupportedModel(f"tensor {name} has values that a 16-bit number cannot hold")
    return values.astype(np.float16)
