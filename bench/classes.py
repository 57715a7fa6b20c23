"""Puna's engine with every instruction set that this processor has, against libllama: one process, taking turns.

A class of processors is what its widest instructions are; a newer processor can be told to compute as an older one would. So
one machine gives the rows of several classes. libllama computes as it was compiled in every row: with ``PUNA_LIBRARY=compiled``
with all that this processor has, with ``PUNA_LIBRARY=prebuilt`` with AVX2. A ratio above 1 says that Puna is faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from tests.oracle import Oracle
from tests.puna_engine import PunaEngine

from bench import models
from bench.facts import facts
from puna.gguf.types import TensorType
from puna.native.kernels.library import kernels
from puna.native.log import route_to_logging

PREFILL = 512
SEQUENCES = (1, 4, 8, 16)  # that decode at once
DEPTH = 64
N_CTX = 1024

FILES: dict[str, tuple[str, Callable[[], Path]]] = {
    "1b": ("Llama 1B shape, Q4_K_M", models.llama_1b),
    "smollm2": ("SmolLM2-135M Q4_1", models.smollm2),
    **{
        kind.name.lower(): (f"Llama 1B shape, {kind.name}", partial(models.llama_1b, kind))
        for kind in (TensorType.Q8_0, TensorType.Q4_0, TensorType.Q6_K, TensorType.F16)
    },
}


@dataclass
class Row:
    model: str
    instructions: str
    what: str
    puna_ms: float  # a step, median
    libllama_ms: float
    ratio: float  # of the medians
    best_ratio: float


@dataclass(frozen=True)
class Case:
    what: str
    n_sequences: int  # that decode; 0: one prompt

    def prepare(self, engine: PunaEngine | Oracle, ids: list[int]) -> None:
        engine.forget()
        for sequence in range(self.n_sequences):
            engine.decode(ids[:DEPTH], range(DEPTH), [sequence] * DEPTH, [DEPTH - 1])

    def block(self, engine: PunaEngine | Oracle, ids: list[int], steps: int) -> list[float]:
        """Seconds of each step, at the same depths each time."""
        n, times = self.n_sequences, []
        for sequence in range(max(n, 1)):
            engine.forget(sequence, DEPTH if n else 0)
        for step in range(steps if n else 1):
            rows = range(n)
            if n:
                arguments: Any = ids[:n], [DEPTH + step] * n, rows, rows
            else:
                arguments = ids[:PREFILL], range(PREFILL), [0] * PREFILL, [PREFILL - 1]
            begin = time.perf_counter()
            engine.decode(*arguments)
            times.append(time.perf_counter() - begin)
        return times


CASES = [Case(f"prefill {PREFILL}", 0), *(Case("decode 1" if n == 1 else f"{n} sequences", n) for n in SEQUENCES)]


def measure(title: str, path: Path, classes: Sequence[str], turns: int, steps: int, n_threads: int) -> list[Row]:
    """One engine serves all classes: packed weights are the same for all of them."""
    own, rows = kernels(), []
    limits: dict[str, Any] = {"n_ctx": N_CTX, "n_sequences": max(SEQUENCES), "n_threads": n_threads}
    ids = np.random.default_rng(0).integers(5, 300, PREFILL).tolist()
    before = own.instructions
    with PunaEngine(path, **limits, use_kernels=True) as puna, Oracle(path, **limits) as oracle:
        for case in CASES:
            times: dict[str, list[float]] = {name: [] for name in (*classes, "")}
            for engine in (puna, oracle):
                case.prepare(engine, ids)
                case.block(engine, ids, 1)  # the first builds the graph
            for turn in range(turns):
                for name in times if turn % 2 else reversed(times):
                    if name:
                        own.use(name)
                    times[name] += case.block(puna if name else oracle, ids, steps)
            own.use(before)
            theirs = times.pop("")
            for name, taken in times.items():
                ours, other = statistics.median(taken), statistics.median(theirs)
                rows.append(Row(title, name, case.what, ours * 1000, other * 1000, other / ours, min(theirs) / min(taken)))
    return rows


def table_of(rows: list[Row]) -> Table:
    """Ratios, in brackets those of the best steps."""
    table = Table("model", "computed with", *(case.what for case in CASES), title="Puna's engine against libllama")
    found = {(row.model, row.instructions, row.what): row for row in rows}
    for model, name in dict.fromkeys((row.model, row.instructions) for row in rows):
        of_cases = (found[model, name, case.what] for case in CASES)
        table.add_row(model, name, *(f"{row.ratio:.2f} ({row.best_ratio:.2f})" for row in of_cases))
    return table


def main() -> None:
    available = [name for name in kernels().available() if name != "portable"]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--class", dest="classes", choices=available, action="append", help="only this one; may be repeated")
    parser.add_argument("--model", choices=FILES, action="append", help="only this model; may be repeated")
    parser.add_argument("--file", type=Path, action="append", help="any other model's file, in place of those")
    parser.add_argument("--turns", type=int, default=6, help="of each contender per row (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="of decoding in one turn (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the rows and the machine's facts to this file")
    args = parser.parse_args()
    route_to_logging()
    wanted: list[tuple[str, Callable[[], Path]]] = [(path.name, partial(Path, path)) for path in args.file or ()]
    wanted += [FILES[name] for name in args.model or ([] if args.file else FILES)]
    rows: list[Row] = []
    for title, make in wanted:
        print(f"{title} …", file=sys.stderr)
        rows += measure(title, make(), args.classes or available, args.turns, args.steps, args.threads)
    console = Console(width=140)
    console.print(table_of(rows))
    about = facts() | {"threads": args.threads, "turns": args.turns, "steps": args.steps}
    console.print(about, soft_wrap=True)
    if args.json:
        args.json.write_text(json.dumps({"facts": about, "rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
