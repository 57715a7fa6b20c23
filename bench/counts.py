"""Milliseconds a token of steps with 1 to 64 sequences, Puna's engine and libllama: where one more is dearer than one fewer.

Who serves many users must not pay for a third one more than for the first two. Every count takes its turn in every round, so
that what other machines do to this one's memory meets all counts alike; shown is the best step of each.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from tests.oracle import Oracle
from tests.puna_engine import PunaEngine

from bench import models
from bench.facts import facts
from bench.report import report
from puna.native.log import route_to_logging

COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 31, 32, 33, 64)
DEPTH = 64
N_CTX = 128
FILES = {"1b": models.llama_1b, "smollm2": models.smollm2}


@dataclass
class Row:
    model: str
    n_sequences: int
    puna_ms: float  # a token, of the best step
    libllama_ms: float


def seconds(engine: PunaEngine | Oracle, n: int, ids: list[int], steps: int) -> float:
    """Of the best of some steps of the first *n* sequences. One before them builds the graph."""
    best = float("inf")
    for step in range(steps + 1):
        begin = time.perf_counter()
        engine.decode(ids[:n], [DEPTH + step] * n, range(n), range(n))
        if step:
            best = min(best, time.perf_counter() - begin)
    for sequence in range(n):
        engine.forget(sequence, DEPTH)
    return best


def measure(name: str, path: Path, rounds: int, steps: int, n_threads: int) -> list[Row]:
    limits: dict[str, Any] = {"n_ctx": N_CTX, "n_sequences": max(COUNTS), "n_threads": n_threads}
    ids = np.random.default_rng(0).integers(5, 300, DEPTH).tolist()
    with PunaEngine(path, **limits, use_kernels=True) as puna, Oracle(path, **limits) as oracle:
        best = {engine: dict.fromkeys(COUNTS, float("inf")) for engine in (puna, oracle)}
        for engine in best:
            for sequence in range(max(COUNTS)):
                engine.decode(ids, range(DEPTH), [sequence] * DEPTH, [DEPTH - 1])
        for _ in range(rounds):
            for n in COUNTS:
                for engine, least in best.items():
                    least[n] = min(least[n], seconds(engine, n, ids, steps))
        return [Row(name, n, *(1000 * least[n] / n for least in best.values())) for n in COUNTS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=FILES, action="append", help="only this one; may be repeated")
    parser.add_argument("--rounds", type=int, default=5, help="through all counts (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="of a count in one round (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the rows and the machine's facts to this file")
    args = parser.parse_args()
    route_to_logging()
    console, rows = Console(width=120), list[Row]()
    for name in args.model or FILES:
        found = measure(name, FILES[name](), args.rounds, args.steps, args.threads)
        table = Table("sequences", "Puna, ms a token", "libllama, ms a token", "ratio", title=name)
        for row in found:
            numbers = (f"{row.puna_ms:.2f}", f"{row.libllama_ms:.2f}", f"{row.libllama_ms / row.puna_ms:.2f}")
            table.add_row(str(row.n_sequences), *numbers)
        console.print(table)
        rows += found
    about = facts() | {"threads": args.threads, "rounds": args.rounds, "steps": args.steps}
    report([], about, rows, args.json)


if __name__ == "__main__":
    main()
