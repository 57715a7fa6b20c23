"""Puna's engine with every instruction set that this processor has, against libllama: one process, taking turns.

A class of processors is what its widest instructions are; a newer processor can be told to compute as an older one would. So
one machine gives the rows of several classes. libllama computes as it was compiled: the compiled library with all that this
processor has, the prebuilt one with AVX2. So classes with registers of 32 bytes meet the prebuilt one, in a process of its own,
unless PUNA_LIBRARY says which one all meet; each row says what libllama computed with. A ratio above 1 says that Puna is faster.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from tests.oracle import Oracle
from tests.puna_engine import PunaEngine

from bench import models
from bench.facts import facts
from bench.report import report
from puna.gguf.types import TensorType
from puna.native.kernels.library import kernels
from puna.native.library import opened
from puna.native.log import route_to_logging

PREFILL = 512
SEQUENCES = (1, 4, 8, 16)  # that decode at once
DEPTH = 64
N_CTX = 1024
NARROW = ("avx_vnni", "avx2")  # classes of registers of 32 bytes
LIBRARY = "PUNA_LIBRARY"
FEATURES = ("AMX_INT8", "AVX512_BF16", "AVX512_VNNI", "AVX512", "AVX_VNNI", "AVX2", "NEON")  # the best of these names a peer

FILES: dict[str, tuple[str, Callable[[], Path]]] = {
    "1b": ("Llama 1B shape, Q4_K_M", models.llama_1b),
    "smollm2": ("SmolLM2-135M Q4_1", models.smollm2),
    **{
        kind.name.lower(): (f"A quarter of the Llama 1B shape, {kind.name}", partial(models.llama_1b, kind, share=4))
        for kind in (TensorType.Q8_0, TensorType.Q4_0, TensorType.Q6_K, TensorType.F16)
    },
}


DEFAULT = ("1b", "smollm2")


@dataclass
class Clock:
    now: Callable[[], float] = time.perf_counter


clock = Clock()


@dataclass
class Row:
    model: str
    instructions: str
    peer: str  # what libllama computed with
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
            begin = clock.now()
            engine.decode(*arguments)
            times.append(clock.now() - begin)
        return times


CASES = [Case(f"prefill {PREFILL}", 0), *(Case("decode 1" if n == 1 else f"{n} sequences", n) for n in SEQUENCES)]


def peer_instructions() -> str:
    """As libllama itself says."""
    library = ctypes.CDLL(str(opened().paths["llama"]))
    library.llama_print_system_info.restype = ctypes.c_char_p
    said = library.llama_print_system_info().decode()
    return next((name.lower() for name in FEATURES if f"{name} = 1" in said), "unknown")


def measured_elsewhere(arguments: Sequence[str], classes: Sequence[str]) -> list[Row]:
    """The same in a process that has the prebuilt library; nothing where there is none."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "bench.classes", *arguments, "--json", str(path)]
        command += [part for name in classes for part in ("--class", name)]
        done = subprocess.run(command, env={**os.environ, LIBRARY: "prebuilt"}, stdout=subprocess.DEVNULL, check=False)
        return [Row(**row) for row in json.loads(path.read_text())["rows"]] if done.returncode == 0 else []


def measure(title: str, path: Path, classes: Sequence[str], turns: int, steps: int, n_threads: int) -> list[Row]:
    """One engine serves all classes: packed weights are the same for all of them."""
    own, peer, rows = kernels(), peer_instructions(), []
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
                rows.append(Row(title, name, peer, case.what, ours * 1000, other * 1000, other / ours, min(theirs) / min(taken)))
    return rows


def table_of(rows: list[Row]) -> Table:
    """Ratios, in brackets those of the best steps."""
    table = Table(
        "model", "computed with", "libllama with", *(case.what for case in CASES), title="Puna's engine against libllama"
    )
    found = {(row.model, row.instructions, row.peer, row.what): row for row in rows}
    for model, name, peer in dict.fromkeys((row.model, row.instructions, row.peer) for row in rows):
        of_cases = (found[model, name, peer, case.what] for case in CASES)
        table.add_row(model, name, peer, *(f"{row.ratio:.2f} ({row.best_ratio:.2f})" for row in of_cases))
    return table


def main() -> None:
    available = [name for name in kernels().available() if name != "portable"]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--class", dest="classes", choices=available, action="append", help="only this one; may be repeated")
    parser.add_argument("--model", choices=FILES, action="append", help="this model; may be repeated (default: 1b, smollm2)")
    parser.add_argument("--file", type=Path, action="append", help="any other model's file, in place of those")
    parser.add_argument("--turns", type=int, default=2, help="of each contender per row (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="of decoding in one turn (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the rows and the machine's facts to this file")
    parser.add_argument(
        "--cpu-time", action="store_true", help="one thread's time on a core, for machines that others use as well"
    )
    args = parser.parse_args()
    route_to_logging()
    if args.cpu_time:
        args.threads, clock.now = 1, time.thread_time
    wanted: list[tuple[str, Callable[[], Path]]] = [(path.name, partial(Path, path)) for path in args.file or ()]
    wanted += [FILES[name] for name in args.model or ([] if args.file else DEFAULT)]
    classes, rows = args.classes or available, list[Row]()
    narrow = [name for name in classes if name in NARROW] if LIBRARY not in os.environ else []
    asked = [part for name in args.model or () for part in ("--model", name)]
    asked += [part for path in args.file or () for part in ("--file", str(path))]
    asked += ["--turns", str(args.turns), "--steps", str(args.steps), "--threads", str(args.threads)]
    elsewhere = measured_elsewhere([*asked, *(["--cpu-time"] if args.cpu_time else [])], narrow) if narrow else []
    here = [name for name in classes if name not in narrow or not elsewhere]
    for title, make in wanted if here else ():
        print(f"{title} …", file=sys.stderr)
        rows += measure(title, make(), here, args.turns, args.steps, args.threads)
    rows += elsewhere
    about = facts() | {"threads": args.threads, "turns": args.turns, "steps": args.steps}
    report([table_of(rows)], about, rows, args.json, width=140)


if __name__ == "__main__":
    main()
