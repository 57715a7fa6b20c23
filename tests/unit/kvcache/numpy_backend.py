"""Just enough of a tensor backend to run a cache on numpy arrays: writing rows, and views of them.

Arrays keep ggml's order reversed, as numpy likes it: a tensor of shape [a, b] is an array of shape (b, a).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from puna.ml.tensor import DType


class ArrayTensor:
    def __init__(self, array: Any, n_bytes: int = 4) -> None:
        self.array = array
        self.n_bytes = n_bytes  # of a value, as caches count

    def flatten(self) -> ArrayTensor:
        a, b, n, _ = self.shape
        return self.reshape(a * b, n)

    def reshape(self, *shape: int) -> ArrayTensor:
        return ArrayTensor(self.array.reshape(shape[::-1]))

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.array.shape[::-1], 1, 1, 1)[:4]

    def rows(self, indices: ArrayTensor) -> ArrayTensor:
        return ArrayTensor(self.array[indices.array.astype(int)])

    def set_rows(self, source: ArrayTensor, indices: ArrayTensor) -> ArrayTensor:
        return ArrayTensor((self, source, indices))

    def view(self, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> ArrayTensor:
        # The cache counts bytes of F16; these arrays hold float32 in the same places.
        first = offset // 2
        steps = [2 * s for s in strides[::-1]] + [4]
        return ArrayTensor(np.lib.stride_tricks.as_strided(self.array.reshape(-1)[first:], shape[::-1], steps))

    def copy_to(self, target: ArrayTensor) -> ArrayTensor:
        target.array[...] = self.array
        return target


class ArrayContext:
    def input(self, dtype: DType, *shape: int) -> ArrayTensor:
        del dtype
        return ArrayTensor(np.zeros(shape[::-1]))

    def use(self, tensor: ArrayTensor) -> ArrayTensor:
        return tensor

    def forward(self, tensor: ArrayTensor) -> None:
        if isinstance(tensor.array, tuple):
            pool, source, indices = tensor.array
            pool.array[indices.array.astype(int)] = source.array

    def set(self, tensor: ArrayTensor, values: Any) -> None:
        assert tensor.array.size == values.size
        tensor.array = values.reshape(tensor.array.shape).copy()

    def memory(self, tensor: ArrayTensor) -> None:
        """As of a device whose memory the host cannot write."""
        del tensor

    def compute(self) -> bool:
        return True

    def close(self) -> None:
        pass


class ArrayBackend:
    """Storage holds NaN, so that nothing unwritten is ever read unnoticed; where a cache counts on zeros, *fill* is 0."""

    def __init__(self, fill: float = np.nan) -> None:
        self.fill = fill
        self._numbers: dict[float, int] = {}  # of values that were read from F16 tensors: two bytes do not hold more of them

    def storage(self, layer: int, dtype: DType, *shape: int) -> ArrayTensor:
        del layer
        return ArrayTensor(np.full(shape[::-1], self.fill, np.float32), 2 if dtype is DType.F16 else 4)

    def read(self, tensor: ArrayTensor, offset: int, out: Any) -> None:
        values = self._values(tensor, offset, out.nbytes)
        if tensor.n_bytes == 4:
            out[:] = values.view(np.uint8)
        else:
            numbers = [self._numbers.setdefault(float(v), len(self._numbers)) for v in values]
            out.view(np.uint16)[:] = numbers

    def write(self, tensor: ArrayTensor, offset: int, values: Any) -> None:
        if tensor.n_bytes == 4:
            new = values.view(np.float32)
        else:
            known = list(self._numbers)
            new = [known[number] for number in values.view(np.uint16)]
        self._values(tensor, offset, values.nbytes)[:] = new

    def _values(self, tensor: ArrayTensor, offset: int, n_bytes: int) -> Any:
        flat = tensor.array.reshape(-1)
        begin, end = offset // tensor.n_bytes, (offset + n_bytes) // tensor.n_bytes
        assert 0 <= begin <= end <= len(flat)
        return flat[begin:end]

    def context(self, max_nodes: int) -> ArrayContext:
        del max_nodes
        return ArrayContext()
