"""Rows of stored tensors, copied to the host's memory and back."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from puna.ml.backend import Backend
from puna.ml.tensor import Tensor

Pool = tuple[Tensor, int]  # a stored tensor, and the bytes of one of its rows
Indices = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


def pieces(source: Indices, target: Indices) -> list[tuple[int, int, int]]:
    """(begin, begin of the copy, count) of each stretch that is contiguous on both sides."""
    cuts = np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1)) + 1
    bounds = [0, *cuts.tolist(), len(source)]
    return [(int(source[b]), int(target[b]), e - b) for b, e in pairwise(bounds)]


def read_rows(backend: Backend, pools: Sequence[Pool], rows: Indices) -> list[Bytes]:
    """These rows of each pool, one after another; not while a graph is computed.

    Errors: MemoryError.
    """
    cuts = pieces(rows, np.arange(len(rows)))
    sizes = [len(rows) * n_bytes for _, n_bytes in pools]
    found = np.split(_block(sum(sizes)), np.cumsum(sizes)[:-1])
    for (pool, n_bytes), values in zip(pools, found, strict=True):
        for row, to, count in cuts:
            backend.read(pool, row * n_bytes, values[to * n_bytes : (to + count) * n_bytes])
    return found


def _block(n_bytes: int) -> Bytes:
    """Memory that the system gets back when it is dropped; the heap of a thread would keep it.

    It is a shared mapping, so puna.host.private_bytes does not take it for what the model was promised.
    """
    try:
        return np.frombuffer(mmap.mmap(-1, n_bytes), np.uint8)
    except OSError as error:
        raise MemoryError(f"no memory for {n_bytes / 1e6:.0f} MB of a cache's rows") from error


def write_rows(backend: Backend, pools: Sequence[Pool], values: Sequence[Bytes], source: Indices, target: Indices) -> None:
    """Of what read_rows gave, the rows *source* go to the rows *target* of the pools; not while a graph is computed."""
    cuts = pieces(source, target)
    for (pool, n_bytes), rows in zip(pools, values, strict=True):
        for begin, row, count in cuts:
            backend.write(pool, row * n_bytes, rows[begin * n_bytes : (begin + count) * n_bytes])
