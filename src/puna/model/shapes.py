"""Tensor shapes of a file against what its metadata calls for: another shape would end the process inside the library."""

from __future__ import annotations

from collections.abc import Mapping

from puna.errors import FileFormatError
from puna.gguf.reader import GGUFFile


def found_shape(file: GGUFFile, name: str) -> tuple[int, ...]:
    return file.tensors[name].shape if name in file.tensors else ()


def check_shapes(file: GGUFFile, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Tensors that the file does not have are no concern here.

    Errors: FileFormatError naming the tensor.
    """
    for name, shape in shapes.items():
        if name in file.tensors and file.tensors[name].shape != shape:
            found = list(file.tensors[name].shape)
            raise FileFormatError(f"{file.path}: tensor {name} has the shape {found}, the metadata calls for {list(shape)}")


def table_shape(file: GGUFFile, name: str, width: int) -> tuple[int, ...]:
    """A table of rows of this width, as many as it has."""
    return (width, *found_shape(file, name)[1:2])
