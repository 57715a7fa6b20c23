"""Attention by Puna's own kernel against ggml's: both in one process, taking turns, over as many layers as a model has.

Each row is a step's attention alone, as nodes of one graph on ggml's threads: of one row at a depth, of several sequences, or of
a prompt's part. A ratio above 1 says that Puna's is faster.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from tests.attended import Case, Data, Rows, prepared
from tests.tiny import write_llama

from bench.facts import facts
from bench.report import report
from puna.ml.ggml.backend import GGMLBackend
from puna.ml.tensor import DType
from puna.native.kernels.library import kernels
from puna.native.log import route_to_logging

# Query heads, key heads, width of a head, layers.
SHAPES = {"smollm2": (9, 3, 64, 30), "1b": (32, 8, 64, 16), "8b": (32, 8, 128, 32)}
TYPES = {"f16": DType.F16, "q8_0": DType.Q8_0, "q4_0": DType.Q4_0}
DEPTHS = (512, 2048, 8192)


@dataclass
class Row:
    model: str
    cache: str
    what: str
    puna_ms: float
    ggml_ms: float
    ratio: float  # of the medians
    best_ratio: float
    gigabytes: float  # a second, of keys and values, in the best of Puna's samples


def rows_of(depth: int) -> dict[str, Rows]:
    padded = -(-depth // 256) * 256
    return {
        f"1 row at {depth}": Rows(1, padded, hidden=0),
        f"8 sequences at {depth}": Rows(1, padded, 8, stride=padded, hidden=0),
        f"512 rows at {depth}": Rows(512, padded + 512, hidden=0),
    }


def race(case: Case, n_layers: int, samples: int, n_threads: int, clock: Callable[[], float]) -> tuple[list[float], list[float]]:
    """Seconds of each sample, Puna's and ggml's."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path, data = write_llama(Path(folder) / "model.gguf", n_layers=n_layers), Data(case)
        runs = []
        for own in (kernels(), None):
            backend = GGMLBackend(path, n_threads=n_threads, kernels=own)
            stack.callback(backend.close)
            run, _ = stack.enter_context(prepared(backend, data, n_layers))
            runs.append(run)
        times: tuple[list[float], list[float]] = ([], [])
        for sample in range(samples + 1):
            for i in (0, 1) if sample % 2 else (1, 0):
                begin = clock()
                runs[i]()
                if sample:  # the first gives the graph its memory
                    times[i].append(clock() - begin)
        return times


def measure(model: str, cache: str, depths: list[int], samples: int, n_threads: int, clock: Callable[[], float]) -> Iterator[Row]:
    n_heads, n_kv_heads, head_dim, n_layers = SHAPES[model]
    for depth in depths:
        for what, rows in rows_of(depth).items():
            case = Case((rows,), head_dim=head_dim, n_heads=n_heads, n_kv_heads=n_kv_heads, dtype=TYPES[cache])
            used = n_layers if rows.n_rows == 1 else 1
            own, ggml = race(case, used, samples, n_threads, clock)
            n_bytes = used * sum(stored.size for stored in Data(case).stored)
            ratio, best = statistics.median(ggml) / statistics.median(own), min(ggml) / min(own)
            yield Row(model, cache, what, min(own) * 1000, min(ggml) * 1000, ratio, best, n_bytes / min(own) / 1e9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SHAPES, action="append", help="only this shape; may be repeated")
    parser.add_argument("--cache", choices=TYPES, action="append", help="only this type of cache; may be repeated")
    parser.add_argument("--depth", type=int, action="append", help="only this depth; may be repeated")
    parser.add_argument("--samples", type=int, default=12, help="of each contender per row (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--instructions", help="compute with this instruction set; the best one otherwise")
    parser.add_argument(
        "--cpu-time", action="store_true", help="one thread's time on a core, for machines that others use as well"
    )
    parser.add_argument("--json", type=Path, help="write the rows and the machine's facts to this file")
    args = parser.parse_args()
    route_to_logging()
    clock = time.process_time if args.cpu_time else time.perf_counter
    n_threads = 1 if args.cpu_time else args.threads
    if args.instructions:
        kernels().use(args.instructions)
    table = Table("model", "cache", "what", "ms", "ggml ms", "ratio", "ratio of the best", "GB/s", title=kernels().instructions)
    rows = []
    for model in args.model or ("smollm2", "1b"):
        for cache in args.cache or ("f16", "q8_0"):
            for row in measure(model, cache, args.depth or list(DEPTHS), args.samples, n_threads, clock):
                rows.append(row)
                numbers = (row.puna_ms, row.ggml_ms, row.ratio, row.best_ratio, row.gigabytes)
                table.add_row(row.model, row.cache, row.what, *(f"{n:.2f}" for n in numbers))
    about = facts() | {"threads": n_threads, "clock": "cpu" if args.cpu_time else "wall", "instructions": kernels().instructions}
    report([table], about, rows, args.json)


if __name__ == "__main__":
    main()
