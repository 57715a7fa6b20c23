"""The compiled tensor library against the prebuilt one: the same engine, file and threads, in processes that take turns.

Each with Puna's own products and with ggml's. The best of all samples counts, since machines are shared; a ratio above 1 says
that the compiled library is faster. Both must be there: ``puna native build``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import models
from bench.facts import facts

LIBRARIES = ("compiled", "prebuilt")
N_PROMPT, N_ROWS, DEPTH = 256, 8, 64


def measure(samples: int, use_kernels: bool) -> dict[str, float]:
    """Milliseconds a step, the best of so many."""
    from tests.puna_engine import PunaEngine

    from puna.native.log import route_to_logging

    route_to_logging()
    with PunaEngine(models.smollm2(), n_ctx=512, n_sequences=N_ROWS, use_kernels=use_kernels) as engine:
        rng = np.random.default_rng(1)

        def tokens(n: int) -> list[int]:
            return [int(token) for token in rng.integers(100, 20000, n)]

        def prompt() -> None:
            engine.decode(tokens(N_PROMPT), range(N_PROMPT), [0] * N_PROMPT, [N_PROMPT - 1])

        def steps(n: int) -> Callable[[], None]:
            for row in range(n):
                engine.forget(row)
                engine.decode(tokens(DEPTH), range(DEPTH), [row] * DEPTH, [DEPTH - 1])
            position = iter(range(DEPTH, 512))

            def step() -> None:
                at = next(position)
                engine.decode(tokens(n), [at] * n, range(n), range(n))

            return step

        def best(work: Callable[[], None], count: int) -> float:
            found = []
            for _ in range(count):
                begin = time.perf_counter()
                work()
                found.append(time.perf_counter() - begin)
            return min(found) * 1e3

        prompts = []
        for _ in range(samples):
            engine.forget(0)
            prompts.append(best(prompt, 1))
        return {
            f"prompt of {N_PROMPT} tokens": min(prompts),
            "one answer, a token": best(steps(1), 8 * samples),
            f"{N_ROWS} answers, a token of each": best(steps(N_ROWS), 8 * samples),
        }


def asked(library: str, samples: int, use_kernels: bool) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.libraries", "--measure", str(int(use_kernels)), "--samples", str(samples)]
    done = subprocess.run(command, env={**os.environ, "PUNA_LIBRARY": library}, stdout=subprocess.PIPE, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of both libraries (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=5, help="of each process (default: %(default)s)")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None:
        print(json.dumps(measure(args.samples, bool(args.measure))))
        return
    table = Table("products of", "what", "compiled, ms", "prebuilt, ms", "ratio", title="SmolLM2-135M Q4_1")
    for name, use_kernels in (("Puna", True), ("ggml", False)):
        best: dict[str, dict[str, float]] = {library: {} for library in LIBRARIES}
        for library in LIBRARIES * args.rounds:
            for what, value in asked(library, args.samples, use_kernels).items():
                best[library][what] = min(value, best[library].get(what, value))
        for what, value in best["compiled"].items():
            other = best["prebuilt"][what]
            table.add_row(name, what, f"{value:.1f}", f"{other:.1f}", f"{other / value:.2f}")
    console = Console(width=120)
    console.print(table)
    console.print(facts(), soft_wrap=True)


if __name__ == "__main__":
    main()
