"""Bounds that a checkpoint has for what goes into its matrices and what comes out: values that training never met are cut off.

In a file they are single numbers beside a matrix, ``NAME.input_min`` and so on, or all of them in one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from puna.errors import FileFormatError
from puna.gguf.reader import GGUFFile
from puna.gguf.types import TensorType
from puna.ml.tensor import Tensor
from puna.nn.layers import Linear

SUFFIXES = ("input_min", "input_max", "output_min", "output_max")
LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Clamps:
    input: tuple[float, float] = (-LARGEST, LARGEST)
    output: tuple[float, float] = (-LARGEST, LARGEST)

    def __call__(self, linear: Linear, x: Tensor) -> Tensor:
        """X [n_in, n] through the matrix, [n_out, n]."""
        return linear(x.clamp(*self.input)).clamp(*self.output)


def read_clamps(file: GGUFFile, names: Sequence[str], packed: str = "") -> Mapping[str, Clamps]:
    """Of these matrices, those that have any. *packed* has four numbers for each of them, in their order; none but zeros: none.

    Errors: FileFormatError for what is no bound.
    """
    found = {}
    if packed in file.tensors:
        numbers = _numbers(file, packed, 4 * len(names)).reshape(-1, 4)
        stated = {name: tuple(four.tolist()) for name, four in zip(names, numbers, strict=True) if four.any()}
    else:
        stated = {name: _beside(file, name) for name in names if any(f"{name}.{suffix}" in file.tensors for suffix in SUFFIXES)}
    for name, (low_in, high_in, low_out, high_out) in stated.items():
        if not (low_in <= high_in and low_out <= high_out):
            raise FileFormatError(f"{file.path}: {name} is bounded by {(low_in, high_in)} and {(low_out, high_out)}")
        found[name] = Clamps((low_in, high_in), (low_out, high_out))
    return found


def _beside(file: GGUFFile, name: str) -> tuple[float, ...]:
    defaults = (-LARGEST, LARGEST, -LARGEST, LARGEST)
    names = [f"{name}.{suffix}" for suffix in SUFFIXES]
    return tuple(
        float(_numbers(file, full, 1)[0]) if full in file.tensors else default
        for full, default in zip(names, defaults, strict=True)
    )


def _numbers(file: GGUFFile, name: str, n: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    info = file.tensors[name]
    if info.type is not TensorType.F32 or info.n_elements != n:
        raise FileFormatError(f"{file.path}: tensor {name} is not {n} numbers in F32")
    return np.frombuffer(file.tensor_data(name), "<f4").astype(np.float32)
