"""How much of what memory gives one sequence's decoding uses: reading alone, a step of Puna, a step of libllama, taking turns.

One token reads all weights once, so nobody decodes faster than memory is read. What memory gives changes under a virtual
machine within seconds and by factors; so samples are sorted by what reading alone gave beside them, and each fifth is a row.
"""

from __future__ import annotations

import argparse
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from tests.oracle import Oracle
from tests.puna_engine import PunaEngine

from bench import models
from bench.facts import facts
from bench.report import report
from puna.native.kernels.library import kernels
from puna.native.log import route_to_logging

DEPTH = 64
READ_BYTES = 400 << 20  # of one thread; more than caches hold
PARTS = 5
BURST, PAUSE_S = 25, 1.0


@dataclass
class Row:
    reading_gbs: float
    puna_ms: float
    libllama_ms: float
    puna_share: float  # of reading alone, by the file's bytes
    libllama_share: float


def seconds(engine: PunaEngine | Oracle) -> float:
    """Of a step that comes after one of the same engine, as steps do."""
    for _ in range(2):
        begin = time.perf_counter()
        engine.decode([7], [DEPTH], [0], [0])
        taken = time.perf_counter() - begin
        engine.forget(0, DEPTH)
    return taken


def measure(path: Path, samples: int, n_threads: int) -> list[Row]:
    own, n_bytes = kernels(), path.stat().st_size
    memory = [np.ones(READ_BYTES, np.uint8) for _ in range(n_threads)]
    limits: dict[str, Any] = {"n_ctx": 512, "n_sequences": 1, "n_threads": n_threads}
    found: list[tuple[float, float, float]] = []
    with (
        ThreadPoolExecutor(n_threads) as pool,
        PunaEngine(path, **limits, use_kernels=True) as puna,
        Oracle(path, **limits) as oracle,
    ):

        def reading() -> float:
            begin = time.perf_counter()
            list(pool.map(lambda part: own.puna_read(part.ctypes.data, READ_BYTES), memory))
            return n_threads * READ_BYTES / (time.perf_counter() - begin)

        for engine in (puna, oracle):
            engine.decode(list(range(5, 5 + DEPTH)), range(DEPTH), [0] * DEPTH, [DEPTH - 1])
        for sample in range(samples):
            if sample % BURST == BURST - 1:
                time.sleep(PAUSE_S)
            before, ours = reading(), seconds(puna)
            found.append(((before + reading()) / 2, ours, seconds(oracle)))
    found.sort()
    rows = []
    for part in np.array_split(np.array(found), PARTS):
        rate, ours, theirs = (statistics.median(column) for column in part.T.tolist())
        rows.append(Row(rate / 1e9, ours * 1000, theirs * 1000, n_bytes / ours / rate, n_bytes / theirs / rate))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=250, help="of each (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the rows and the machine's facts to this file")
    args = parser.parse_args()
    route_to_logging()
    rows = measure(models.llama_1b(), args.samples, args.threads)
    table = Table(
        "reading alone, GB/s", "Puna, ms", "of reading", "libllama, ms", "of reading", "ratio", title="Llama 1B shape, Q4_K_M"
    )
    for row in rows:
        numbers = (row.puna_ms, row.puna_share, row.libllama_ms, row.libllama_share, row.libllama_ms / row.puna_ms)
        table.add_row(f"{row.reading_gbs:.1f}", *(f"{number:.2f}" for number in numbers))
    about = facts() | {"threads": args.threads, "samples": args.samples}
    report([table], about, rows, args.json)


if __name__ == "__main__":
    main()
