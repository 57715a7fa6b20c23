"""Puna's engine against libllama: same process, same ggml, same file, same threads, taking turns.

Only ratios mean anything: machines are shared and differ. Each row alternates the two contenders every few steps and
compares the medians of their times per step; a ratio above 1 says that Puna is faster.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table
from tests.models.table import ENCODERS
from tests.oracle import Oracle
from tests.puna_engine import PunaEngine

from bench import models, slices
from bench.facts import facts
from bench.report import report
from puna.native.log import route_to_logging

N_SEQUENCES = 8
BLOCK = 4


class Encoder(Oracle):
    """Gives a text's pooled vector in place of logits."""

    def decode(
        self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int], outputs: Sequence[int]
    ) -> npt.NDArray[np.float32]:
        return self.embed([tokens])


Engine = PunaEngine | Oracle
# Prepares an engine and returns one step to time.
Prepare = Callable[[Engine, list[int]], Callable[[], object]]


@dataclass
class Row:
    model: str
    what: str
    tokens_per_step: int
    puna_ms: float
    libllama_ms: float
    ratio: float  # of the medians; above 1: Puna is faster
    best_ratio: float  # of the fastest steps


def prefill(n_tokens: int) -> Prepare:
    def prepare(engine: Engine, ids: list[int]) -> Callable[[], object]:
        def step() -> object:
            engine.forget()
            return engine.decode(ids[:n_tokens], range(n_tokens), [0] * n_tokens, [n_tokens - 1])

        return step

    return prepare


def encode(n_tokens: int) -> Prepare:
    """One text as a whole, with the hidden states of all its tokens, which pooling needs."""

    def prepare(engine: Engine, ids: list[int]) -> Callable[[], object]:
        return lambda: engine.decode(ids[:n_tokens], range(n_tokens), [0] * n_tokens, range(n_tokens))

    return prepare


def decode(depth: int, n_sequences: int = 1) -> Prepare:
    def prepare(engine: Engine, ids: list[int]) -> Callable[[], object]:
        engine.forget()
        for sequence in range(n_sequences if depth else 0):
            engine.decode(ids[:depth], range(depth), [sequence] * depth, [depth - 1])
        position = depth

        def step() -> object:
            nonlocal position
            rows = range(n_sequences)
            logits = engine.decode(ids[:n_sequences], [position] * n_sequences, rows, rows)
            position += 1
            return logits

        return step

    return prepare


@dataclass
class Case:
    what: str
    tokens_per_step: int
    steps: int  # in one turn
    prepare: Prepare


CASES = [
    Case("prefill 512", 512, 1, prefill(512)),
    Case("decode at depth 0", 1, 48, decode(0)),
    Case("decode at depth 512", 1, 48, decode(512)),
    Case("8 sequences, depth 64", 8, 16, decode(64, 8)),
]

# Of six layers of a large model, which take as long for a step as a whole small one.
ARCH_CASES = [
    Case("prefill 512", 512, 1, prefill(512)),
    Case("decode at depth 512", 1, 16, decode(512)),
]

ENCODER_CASES = [Case("encode 512", 512, 4, encode(512))]


@dataclass
class Clock:
    now: Callable[[], float] = time.perf_counter


clock = Clock()


def race(case: Case, name: str, contenders: tuple[Engine, Engine], ids: list[int], turns: int) -> Row:
    """Short steps are taken a few at a time by each in turn: a machine's speed changes within seconds."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns):
        steps = [case.prepare(contender, ids) for contender in contenders]
        for step in steps if turn == 0 or case.steps > 1 else ():
            step()  # the first builds the graph; that of a prompt as a whole stays
        for block in range(-(-case.steps // BLOCK)):
            for i in (0, 1) if (turn + block) % 2 == 0 else (1, 0):
                for _ in range(min(BLOCK, case.steps)):
                    begin = clock.now()
                    steps[i]()
                    times[i].append(clock.now() - begin)
    puna, oracle = (statistics.median(t) * 1000 for t in times)
    return Row(name, case.what, case.tokens_per_step, puna, oracle, oracle / puna, min(times[1]) / min(times[0]))


def run(name: str, path: Path, turns: int, n_threads: int, cases: list[Case]) -> list[Row]:
    limits: dict[str, Any] = {"n_ctx": 1024, "n_sequences": N_SEQUENCES, "n_threads": n_threads}
    with PunaEngine(path, **limits) as puna, Oracle(path, **limits) as oracle:
        return races(cases, name, (puna, oracle), turns)


def run_encoder(name: str, path: Path, turns: int, n_threads: int) -> list[Row]:
    limits: dict[str, Any] = {"n_ctx": 512, "n_threads": n_threads}
    with PunaEngine(path, **limits) as puna, Encoder(path, **limits, embeddings=True) as oracle:
        return races(ENCODER_CASES, name, (puna, oracle), turns)


def races(cases: list[Case], name: str, contenders: tuple[Engine, Engine], turns: int) -> list[Row]:
    ids = np.random.default_rng(0).integers(5, 300, 1024).tolist()
    return [race(case, name, contenders, ids, turns if case.steps > 1 else turns * 2) for case in cases]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=4, help="turns of each contender per row (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", choices=("smollm2", "1b"), action="append", help="only this model; may be repeated")
    parser.add_argument(
        "--arch", choices=("all", *slices.SLICES), action="append", help="six layers of a family; may be repeated"
    )
    parser.add_argument("--json", type=Path, help="write the rows and the machine's facts to this file")
    parser.add_argument(
        "--cpu-time", action="store_true", help="one thread's time on a core, for machines that others use as well"
    )
    args = parser.parse_args()
    route_to_logging()
    if args.cpu_time:
        args.threads, clock.now = 1, time.process_time
    rows = []
    wanted = args.model or ([] if args.arch else ["smollm2", "1b"])
    for name, key, make in (
        ("SmolLM2-135M Q4_1", "smollm2", models.smollm2),
        ("Llama 1B shape, Q4_K_M", "1b", models.llama_1b),
    ):
        if key in wanted:
            print(f"{name} …", file=sys.stderr)
            rows += run(name, make(), args.turns, args.threads, CASES)
    for name in slices.SLICES if "all" in (args.arch or ()) else args.arch or ():
        print(f"{name} …", file=sys.stderr)
        title, path = f"{name}: {slices.SLICES[name].model}", slices.path_of(name)
        if name in ENCODERS:
            rows += run_encoder(title, path, args.turns, args.threads)
        else:
            rows += run(title, path, args.turns, args.threads, ARCH_CASES)
    table = Table(
        "model", "what", "puna tok/s", "libllama tok/s", "ratio", "ratio of the best", title="Puna's engine against libllama"
    )
    for row in rows:
        puna, oracle = (row.tokens_per_step * 1000 / ms for ms in (row.puna_ms, row.libllama_ms))
        table.add_row(row.model, row.what, f"{puna:.1f}", f"{oracle:.1f}", f"{row.ratio:.3f}", f"{row.best_ratio:.3f}")
    about = facts() | {"threads": args.threads, "turns": args.turns, "clock": "cpu" if args.cpu_time else "wall"}
    report([table], about, rows, args.json)


if __name__ == "__main__":
    main()
