"""Puna's matrix products against ggml's: every format and number of tokens, both in one process, taking turns.

First what the machine can do: reading from memory, and multiply-adds of bytes. Then each product as a node of a graph, on
ggml's threads, over more weights than the caches hold, activations rounded anew each time. Then gate and up of experts, of which
each token goes through a few. GB/s are of packed weights. A ratio above 1 says that Puna's is faster.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from tests.packed import ALL_TYPES

from bench.facts import facts
from bench.report import report
from puna.gguf.types import TensorType
from puna.gguf.writer import GGUFWriter
from puna.ml.backend import Use
from puna.ml.ggml.backend import GGMLBackend
from puna.ml.tensor import DType, Gate
from puna.native import products
from puna.native.kernels.library import Kernels, kernels
from puna.native.log import route_to_logging

SHAPES = {"q4_1": (576, 1536)}  # of a small model; of the others:
SHAPE = (2048, 8192)
FORMATS = ("q4_K", "q6_K", "q8_0", "q5_0", "q4_0", "q4_1", "f16")  # what files are made of most
FEW_TOKENS = (1, 2, 4, 7, 8, 16, 17, 33, 128)
TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 31, 32, 33, 64, 128, 512)
N_EXPERTS, N_USED, EXPERT_SHAPE = 64, 8, (2048, 768)
EXPERT_FORMATS = ("q4_K", "q8_0", "mxfp4")
FEW_OF_EXPERTS = (1, 8, 32, 128)
EXPERT_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
STACKS = ("blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight")
WEIGHT_BYTES = 200 << 20
READ_BYTES = 8 << 20
MOST_PER_STEP = 2e9  # multiply-adds of one sample


@dataclass
class Clock:
    now: Callable[[], float] = time.perf_counter


clock = Clock()


@dataclass
class Row:
    format: str
    tokens: int
    gmacs: float  # the best of Puna's samples, thousand million multiply-adds a second
    share_of_peak: float
    gigabytes: float  # a second, of packed weights
    share_of_reading: float
    ggml_gmacs: float
    ratio: float  # of the medians
    best_ratio: float


def best_of(n_threads: int, seconds: float, work: Any) -> float:
    """The most units a second that so many threads do together, of samples as short as *work* is."""
    best, end = 0.0, time.perf_counter() + seconds
    with ThreadPoolExecutor(n_threads) as pool:
        together = map if n_threads == 1 else pool.map
        while time.perf_counter() < end:
            begin = clock.now()
            units = sum(together(work, range(n_threads)))
            best = max(best, units / (clock.now() - begin))
    return best


def peak(own: Kernels, n_threads: int) -> float:
    return best_of(n_threads, 1.0, lambda _thread: own.puna_exercise(2_000_000)) / 1e9


def reading(own: Kernels, n_threads: int) -> float:
    """In samples as short as a product, each of memory that was not read for long."""
    memory = np.ones(WEIGHT_BYTES, np.uint8)
    samples = itertools.cycle(range(WEIGHT_BYTES // READ_BYTES))

    def read(_thread: int) -> int:
        own.puna_read(memory.ctypes.data + next(samples) * READ_BYTES, READ_BYTES)
        return READ_BYTES

    return best_of(n_threads, 2.0, read) / 1e9


class Contender:
    """Many matrices of a file on one backend, and graphs that multiply them all."""

    def __init__(self, path: Path, n_matrices: int, n_threads: int, own: Kernels | None) -> None:
        self.backend = GGMLBackend(path, n_threads=n_threads, use_mmap=False, kernels=own)
        self.weights = [self.backend.tensor(f"blk.{i}.weight", Use.MATRIX) for i in range(n_matrices)]
        self.backend.allocate()
        self.backend.load(lambda _share: None)
        self._next = 0

    def prepare(self, n_tokens: int, n_in: int, n_products: int) -> Any:
        """A step of so many products, from the matrix on where the last one ended."""
        context = self.backend.context(4 * len(self.weights) + 64)
        x = context.input(DType.F32, n_in, n_tokens)
        for i in range(n_products):
            context.output(self.weights[(self._next + i) % len(self.weights)].mul_mat(x))
        self._next += n_products
        values = np.random.default_rng(n_tokens).standard_normal((n_tokens, n_in), np.float32)

        def step() -> float:
            context.set(x, values)
            begin = clock.now()
            context.compute()
            return clock.now() - begin

        return step, context.close

    def close(self) -> None:
        self.backend.close()


def write(path: Path, tensor_type: int, n_in: int, n_out: int) -> int:
    """A file of matrices that no cache holds; how many there are."""
    kind = TensorType(tensor_type)
    data, _ = products.random_weights(tensor_type, n_in * 64)
    matrix = np.tile(data, n_out // 64)
    n = max(2, WEIGHT_BYTES // matrix.size)
    writer = GGUFWriter("llama")
    writer.add("llama.block_count", n)
    for i in range(n):
        writer.add_raw_tensor(f"blk.{i}.weight", (n_in, n_out), kind, matrix)
    writer.write(path)
    return n


class ExpertContender:
    """Gate and up of many experts, and graphs that send tokens through some of them."""

    def __init__(self, path: Path, n_threads: int, own: Kernels | None) -> None:
        self.backend = GGMLBackend(path, n_threads=n_threads, use_mmap=False, kernels=own)
        self.weights = [self.backend.tensor(name, Use.EXPERTS) for name in STACKS]
        self.backend.allocate()
        self.backend.load(lambda _share: None)

    def prepare(self, chosen: NDArray[np.int32]) -> Any:
        context = self.backend.context(64)
        n_tokens, n_in = len(chosen), EXPERT_SHAPE[0]
        x, experts = context.input(DType.F32, n_in, 1, n_tokens), context.input(DType.I32, N_USED, n_tokens)
        context.output(x.gated_expert_product(self.weights, experts, Gate.SILU))
        values = np.random.default_rng(n_tokens).standard_normal((n_tokens, n_in), np.float32)

        def step() -> float:
            context.set(x, values)
            context.set(experts, chosen)
            begin = clock.now()
            context.compute()
            return clock.now() - begin

        return step, context.close

    def close(self) -> None:
        self.backend.close()


def write_experts(path: Path, tensor_type: int) -> None:
    kind, (n_in, n_out) = TensorType(tensor_type), EXPERT_SHAPE
    data, _ = products.random_weights(tensor_type, n_in * 64)
    writer = GGUFWriter("llama")
    writer.add("llama.block_count", 1)
    for name in STACKS:
        writer.add_raw_tensor(name, (n_in, n_out, N_EXPERTS), kind, np.tile(data, n_out // 64 * N_EXPERTS))
    writer.write(path)


def race(steps: list[Any], samples: int) -> tuple[list[float], list[float]]:
    """Seconds of each sample of both contenders; then their graphs are closed."""
    times: tuple[list[float], list[float]] = ([], [])
    for sample in range(samples + 1):
        for i in (0, 1) if sample % 2 else (1, 0):
            seconds = steps[i][0]()
            if sample:  # the first gives the graph its memory
                times[i].append(seconds)
    for _, close in steps:
        close()
    return times


def row(
    name: str, tokens: int, macs: float, n_bytes: float, times: tuple[list[float], list[float]], limits: tuple[float, float]
) -> Row:
    best = [macs / min(t) / 1e9 for t in times]
    gigabytes = n_bytes / min(times[0]) / 1e9
    ratio = statistics.median(times[1]) / statistics.median(times[0])
    return Row(name, tokens, best[0], best[0] / limits[0], gigabytes, gigabytes / limits[1], best[1], ratio, best[0] / best[1])


def measure(name: str, tokens: list[int], samples: int, n_threads: int, own: Kernels, limits: tuple[float, float]) -> list[Row]:
    n_in, n_out = SHAPES.get(name, SHAPE)
    packed_bytes = own.puna_packed_bytes(ALL_TYPES[name], n_in, n_out)
    rows = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = Path(folder) / "matrices.gguf"
        n = write(path, ALL_TYPES[name], n_in, n_out)
        contenders = [Contender(path, n, n_threads, kind) for kind in (own, None)]
        for contender in contenders:
            stack.callback(contender.close)
        for n_tokens in tokens:
            of_one = n_in * n_out * n_tokens
            n_products = max(1, min(n, int(MOST_PER_STEP / of_one)))
            steps = [contender.prepare(n_tokens, n_in, n_products) for contender in contenders]
            times = race(steps, samples)
            rows.append(row(name, n_tokens, n_products * of_one, n_products * packed_bytes, times, limits))
    return rows


def measure_experts(
    name: str, tokens: list[int], samples: int, n_threads: int, own: Kernels, limits: tuple[float, float]
) -> list[Row]:
    n_in, n_out = EXPERT_SHAPE
    matrix_bytes = own.puna_packed_bytes(ALL_TYPES[name], n_in, n_out)
    rows = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = Path(folder) / "experts.gguf"
        write_experts(path, ALL_TYPES[name])
        contenders = [ExpertContender(path, n_threads, kind) for kind in (own, None)]
        for contender in contenders:
            stack.callback(contender.close)
        random = np.random.default_rng(0)
        for n_tokens in tokens:
            chosen = np.stack([random.choice(N_EXPERTS, N_USED, replace=False) for _ in range(n_tokens)]).astype(np.int32)
            times = race([contender.prepare(chosen) for contender in contenders], samples)
            n_read = len(STACKS) * len(np.unique(chosen)) * matrix_bytes
            macs = len(STACKS) * n_in * n_out * n_tokens * N_USED
            rows.append(row(f"{name}, {N_USED} of {N_EXPERTS} experts", n_tokens, macs, n_read, times, limits))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--format", choices=ALL_TYPES, action="append", help="only this format; may be repeated")
    parser.add_argument(
        "--experts", choices=("too", "only", "none"), default="too", help="rows of experts (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, action="append", help="only this number of tokens; may be repeated")
    parser.add_argument("--whole", action="store_true", help="every format and number of tokens: most of an hour")
    parser.add_argument("--samples", type=int, default=5, help="of each contender per row (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--instructions", help="compute with this instruction set; the best one otherwise")
    parser.add_argument("--json", type=Path, help="write the rows and the machine's facts to this file")
    parser.add_argument(
        "--cpu-time", action="store_true", help="products by one thread's time on a core, for machines that others use as well"
    )
    args = parser.parse_args()
    route_to_logging()
    if args.cpu_time:
        args.threads, clock.now = 1, time.thread_time
    own = kernels()
    if args.instructions:
        own.use(args.instructions)
    limits = peak(own, args.threads), reading(own, args.threads)
    rows = []
    tokens = args.tokens or list(TOKENS if args.whole else FEW_TOKENS)
    of_experts = args.tokens or list(EXPERT_TOKENS if args.whole else FEW_OF_EXPERTS)
    for name in args.format or (ALL_TYPES if args.whole else FORMATS):
        if args.experts != "only":
            rows += measure(name, tokens, args.samples, args.threads, own, limits)
    for name in args.format or EXPERT_FORMATS:
        if args.experts != "none":
            rows += measure_experts(name, of_experts, args.samples, args.threads, own, limits)
    title = f"{own.instructions}, {args.threads} threads; the machine: {limits[0]:.0f} GMAC/s, reads {limits[1]:.1f} GB/s"
    table = Table(
        "format", "tokens", "GMAC/s", "of peak", "GB/s", "of reading", "ggml GMAC/s", "ratio", "ratio of the best", title=title
    )
    for r in rows:
        numbers = (
            f"{r.gmacs:.1f}",
            f"{r.share_of_peak:.0%}",
            f"{r.gigabytes:.1f}",
            f"{r.share_of_reading:.0%}",
            f"{r.ggml_gmacs:.1f}",
        )
        table.add_row(r.format, str(r.tokens), *numbers, f"{r.ratio:.2f}", f"{r.best_ratio:.2f}")
    about = facts() | {"threads": args.threads, "instructions": own.instructions, "peak_gmacs": limits[0], "read_gbs": limits[1]}
    report([table], about, rows, args.json)


if __name__ == "__main__":
    main()
