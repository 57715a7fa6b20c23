"""A long context: the engine with an f16 and with a q8_0 cache, and libllama with f16, in one process, taking turns.

On a quarter of the Llama 1B shape, layers and tokens alike: as much of a step is attention as in the whole, and the long context
is computed in a quarter of the time. It is computed once by each contender, in parts of a batch; libllama's q8_0 cache is left
out, since computing a long context with it takes many times as long. Ratios above 1 say that Puna, or that q8_0, is faster.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
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
from puna.native.ggml import TYPE_F16, TYPE_Q8_0
from puna.native.log import route_to_logging

SHARE = 4
PART = 512
KINDS = {"Puna, f16": (PunaEngine, TYPE_F16), "Puna, q8_0": (PunaEngine, TYPE_Q8_0), "libllama, f16": (Oracle, TYPE_F16)}


@dataclass
class Row:
    what: str
    ms: dict[str, float]  # of a step, median
    best_ms: dict[str, float]

    def ratio(self, slower: str, faster: str) -> str:
        """Of the medians, in brackets of the best steps."""
        return f"{self.ms[slower] / self.ms[faster]:.2f} ({self.best_ms[slower] / self.best_ms[faster]:.2f})"


@dataclass(frozen=True)
class Case:
    what: str
    n_tokens: int
    steps: int  # in one turn


class Contender:
    """An engine whose first sequence holds so many tokens."""

    def __init__(self, kind: str, path: Path, depth: int, n_threads: int) -> None:
        opened, cache_type = KINDS[kind]
        limits: dict[str, Any] = {"n_ctx": depth + 2 * PART, "n_threads": n_threads, "cache_type": cache_type}
        self._engine: PunaEngine | Oracle = opened(path, **limits)
        self._ids = np.random.default_rng(0).integers(5, 300, PART).tolist()
        self._depth = depth
        for at in range(0, depth, PART):
            self._decode(at, min(PART, depth - at))

    def _decode(self, at: int, n: int) -> None:
        self._engine.decode(self._ids[:n], range(at, at + n), [0] * n, [n - 1])

    def block(self, case: Case) -> list[float]:
        """Seconds of each step, at the same depths each time."""
        times = []
        self._engine.forget(0, self._depth)
        for step in range(case.steps):
            begin = time.perf_counter()
            self._decode(self._depth + step, case.n_tokens)
            times.append(time.perf_counter() - begin)
        return times

    def close(self) -> None:
        self._engine.close()


def race(case: Case, contenders: dict[str, Contender], turns: int) -> Row:
    times: dict[str, list[float]] = {kind: [] for kind in contenders}
    for turn in range(turns + 1):
        for kind in contenders if turn % 2 else reversed(contenders):
            found = contenders[kind].block(case)
            if turn:  # the first builds the graph
                times[kind] += found
    middle = {kind: statistics.median(taken) * 1000 for kind, taken in times.items()}
    return Row(case.what, middle, {kind: min(taken) * 1000 for kind, taken in times.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", type=int, default=8192, help="tokens before the steps that are timed (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="of each contender per row (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--whole", action="store_true", help="all layers and tokens of the 1B shape")
    parser.add_argument("--json", type=Path, help="write the rows and the machine's facts to this file")
    args = parser.parse_args()
    route_to_logging()
    path = models.llama_1b(share=1 if args.whole else SHARE)
    contenders: dict[str, Contender] = {}
    filled: dict[str, float] = {}
    cases = (Case(f"decode at depth {args.depth}", 1, 12), Case(f"prefill {PART} at depth {args.depth}", PART, 1))
    try:
        for kind in KINDS:
            print(f"{kind}: {args.depth} tokens …", file=sys.stderr)
            begin = time.perf_counter()
            contenders[kind] = Contender(kind, path, args.depth, args.threads)
            filled[kind] = (time.perf_counter() - begin) * 1000
        rows = [Row(f"0 to depth {args.depth}", filled, filled), *(race(case, contenders, args.turns) for case in cases)]
    finally:
        for contender in contenders.values():
            contender.close()
    f16, q8_0, peer = KINDS
    title = f"{'The' if args.whole else 'A quarter of the'} Llama 1B shape, Q4_K_M"
    table = Table("what", *(f"{kind} ms" for kind in KINDS), "f16 / libllama", "q8_0 / f16", title=title)
    for row in rows:
        shown = (f"{row.ms[kind]:.1f}" for kind in KINDS)
        table.add_row(row.what, *shown, row.ratio(peer, f16), row.ratio(f16, q8_0))
    about = facts() | {"threads": args.threads, "turns": args.turns}
    report([table], about, rows, args.json, width=130)


if __name__ == "__main__":
    main()
