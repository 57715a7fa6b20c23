"""Which of several instruction sets a processor multiplies fastest with, measured in a few milliseconds.

Wider registers do not always win: some processors lower their clock for them, and some compute half of one at a time. Knows
only that the library computes with the set it was told to.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable, Sequence
from typing import Any

N_IN, N_ROWS, N_TOKENS = 1024, 128, 32  # of Q4_K: 4 million multiply-adds, which stay in the second cache
ROUNDS = 12
TYPE_Q4_K = 12


def fastest(names: Sequence[str], use: Callable[[str], None], work: Callable[[], None]) -> str:
    """The set with the shortest time of its best round; they take turns, so that what disturbs one disturbs all."""
    best = dict.fromkeys(names, float("inf"))
    for _ in range(ROUNDS):
        for name in names:
            use(name)
            begin = time.perf_counter()
            work()
            best[name] = min(best[name], time.perf_counter() - begin)
    return min(names, key=lambda name: best[name])


class Product:
    """A product of zeros, which takes as long as any other."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self._matrix = kernels.puna_matrix_new(TYPE_Q4_K, N_IN, N_ROWS)
        rounded_bytes = kernels.puna_rounded_bytes(kernels.puna_rounding(TYPE_Q4_K), N_IN, N_TOKENS)
        sizes = (kernels.puna_packed_bytes(TYPE_Q4_K, N_IN, N_ROWS), rounded_bytes, 4 * N_ROWS * N_TOKENS)
        self._blocks = [mmap.mmap(-1, size) for size in sizes]  # pages begin lines of the cache

    def __call__(self) -> None:
        weights, rounded, results = (ctypes.addressof(ctypes.c_char.from_buffer(block)) for block in self._blocks)
        self._kernels.puna_multiply(self._matrix, weights, rounded, N_TOKENS, results)

    def close(self) -> None:
        self._kernels.puna_matrix_free(self._matrix)
