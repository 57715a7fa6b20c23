"""What the engine may ask of the tensor library: weights, graphs, storage, memory figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from puna.ml.attention import AttentionRange, Scoring
from puna.ml.tensor import DType, Tensor
from puna.wire import MemoryReport


class Use(Enum):
    """What a weight is used for; it decides which memory it may live in."""

    MATRIX = "matrix"  # receiver of mul_mat
    EXPERTS = "experts"  # receiver of mul_mat_id
    ROWS = "rows"  # looked up by row: token embeddings
    VECTOR = "vector"  # elementwise: norms, biases, rope factors
    OPERAND = "operand"  # of recurrent operations, which take F32 alone: kernels, decays


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to a weight: the product of two matrices, times scale; their shapes are puna.gguf.lora's."""

    down: Tensor
    up: Tensor
    scale: float


class Context(Protocol):
    """Builds one graph and runs it, as often as its shape fits.

    Nothing that changes from step to step may be baked into a graph: tokens, positions, cache rows, masks and output
    rows are inputs. Every input must be set before every compute, because its memory is reused once it was read.
    """

    def input(self, dtype: DType, *shape: int) -> Tensor: ...
    def use(self, tensor: Any) -> Any:
        """A handle on a weight or stored tensor for building with it in this graph."""

    def forward(self, tensor: Tensor) -> None:
        """Make the tensor part of the graph, in the order of the calls."""

    def attention(self, query: Tensor, ranges: Sequence[AttentionRange], scoring: Scoring) -> Tensor:
        """Every row's mixture of the values that its range shows it; the ranges cover all rows in order.

        Shapes: query [head_dim, n_heads, n]; the result is [head_dim of value * n_heads, n]. Query heads take key and value
        heads in groups, n_heads / n_kv_heads one after another the same.
        """

    def turn(self, x: Tensor, width: int) -> Tensor:
        """X F32 [n_in, ...] with every *width* values of a column times an orthonormal Walsh-Hadamard matrix.

        That is its own inverse. The width is a power of two from 16 on.
        """

    def output(self, tensor: Tensor) -> None:
        """As forward, and keep its memory until the graph is rebuilt."""

    def reserve(self) -> None:
        """Allocate working memory for a graph of this size without running it.

        Errors: OutOfMemory.
        """

    def allocate(self) -> None:
        """Give the graph its working memory, if it has none yet; setting inputs would.

        Errors: OutOfMemory.
        """

    def set(self, tensor: Tensor, values: npt.NDArray[Any]) -> None: ...
    def memory(self, tensor: Tensor) -> memoryview | None:
        """An input's own bytes, to be written in place of setting it, until the compute; None where the host cannot."""

    def compute(self) -> bool:
        """Run; False when it was aborted on request."""

    def get(self, tensor: Tensor, out: npt.NDArray[np.float32]) -> None: ...
    def values(self, tensor: Tensor) -> npt.NDArray[np.float32]:
        """What an output [width, n] holds, as [n, width]; where it lies if the host can read it, and only until the next
        compute or close. Not to be changed.
        """

    def close(self) -> None: ...


class Backend(Protocol):
    """A model file opened on devices. Order: tensors are asked for, allocate, then load, then contexts run."""

    n_layers: int

    @property
    def taken(self) -> Set[str]:
        """The names of the file's tensors that were asked for."""

    def has_tensor(self, name: str) -> bool: ...
    def tensor(self, name: str, use: Use) -> Tensor: ...
    def joined(self, names: Sequence[str]) -> Sequence[Tensor] | None:
        """Matrices that will be asked for products of the same input, kept as one: one product, bit for bit the same.

        Each of the tensors stands for one of the matrices, for products alone. None where that cannot be or does not pay:
        other types or widths, adapters, or large matrices that would otherwise stay in the mapped file.
        """

    def low_rank(self, name: str, use: Use) -> Sequence[LowRank]:
        """What the adapters add to the weight *name* where it has this use."""

    def storage(self, layer: int, dtype: DType, *shape: int) -> Tensor:
        """Zeroed memory on the layer's device that outlives graphs: caches."""

    def read(self, tensor: Tensor, offset: int, out: npt.NDArray[np.uint8]) -> None:
        """Copy the bytes of a stored tensor from *offset* on to the host; not while a graph is computed."""

    def write(self, tensor: Tensor, offset: int, values: npt.NDArray[np.uint8]) -> None:
        """The way back."""

    def allocate(self) -> None: ...
    def load(self, progress: Callable[[float], None]) -> None: ...
    def context(self, max_nodes: int) -> Context: ...
    def memory(self) -> MemoryReport: ...
    def set_threads(self, n_threads: int) -> None: ...
    def abort(self) -> None:
        """Make the running compute, and any other until clear_abort, end early; from any thread."""

    def clear_abort(self) -> None: ...

    def close(self) -> None: ...


def row_bytes(dtype: DType, n: int) -> int:
    """Bytes of a row of n values."""
    block, size = {
        DType.F32: (1, 4),
        DType.F16: (1, 2),
        DType.Q8_0: (32, 34),
        DType.Q4_0: (32, 18),
        DType.I32: (1, 4),
        DType.I64: (1, 8),
    }[dtype]
    if n % block:
        raise ValueError(f"a row of {n} values cannot be stored as {dtype.name}: not a multiple of {block}")
    return n // block * size
