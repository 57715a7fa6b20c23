"""Decoding beside other busy processes: the number of threads that adapts against a fixed one.

Two engines in one process hold the same model: one left to itself, one told how many threads to use. They take turns at
decoding one sequence, beside no busy process, one, two, and none again. Above 1 the adapting one is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import models
from bench.facts import facts
from puna.native import cpu
from puna.native.usage import usage
from puna.runner.engine import Engine
from puna.wire import CompletionReply, CompletionRequest, Done, LoadOptions, LoadRequest, Piece, SamplingOptions

N_CTX = 2048
SETTLE_S = 1.0  # for processes that start or end


@dataclass
class Row:
    model: str
    n_busy: int
    adapting: float  # tokens/s, median of the turns
    fixed: float
    ratio: float
    n_threads: list[int]  # of the adapting engine after each turn
    strangers: float  # cores that neither the engines nor our busy processes took, mean


def open_engine(path: Path, n_threads: int) -> Engine:
    engine = Engine(path)
    reply = engine.load(LoadRequest(options=LoadOptions(n_ctx=N_CTX, n_parallel=1, n_threads=n_threads)))
    if not reply.success:
        sys.exit(reply.error)
    while engine.health().status != "ready":
        time.sleep(0.01)
    return engine


def decode(engine: Engine, seconds: float) -> float:
    """Tokens per second of one sequence that is cancelled after some time."""
    replies: queue.SimpleQueue[CompletionReply] = queue.SimpleQueue()
    sampling = SamplingOptions(temperature=0.0)
    request = CompletionRequest(prompt="Once upon a time", n_predict=100_000, ignore_eos=True, shift=True, sampling=sampling)
    handle = engine.submit(request, replies.put)
    first = replies.get(timeout=60)
    time.sleep(seconds)
    handle.cancel()
    reply = first
    while isinstance(reply, Piece):
        reply = replies.get(timeout=60)
    if not isinstance(reply, Done) or not reply.eval_count:
        sys.exit(f"no tokens: {reply}")
    return reply.eval_count / (reply.eval_duration / 1e9)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    code = f"import os\nwhile os.getppid() == {os.getpid()}:\n for _ in range(1000000): pass"
    processes = [subprocess.Popen([sys.executable, "-S", "-c", code]) for _ in range(count)]
    try:
        time.sleep(SETTLE_S)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
        time.sleep(SETTLE_S)


def n_threads_of(engine: Engine) -> int:
    loaded = engine.loop.model
    return loaded.threads.count if loaded.threads else 0


def race(name: str, path: Path, n_fixed: int, counts: list[int], turns: int, turn_s: float) -> list[Row]:
    adapting, fixed = open_engine(path, 0), open_engine(path, n_fixed)
    rows = []
    try:
        for engine in (adapting, fixed):
            decode(engine, 0.5)
        for n_busy in counts:
            speeds: tuple[list[float], list[float]] = ([], [])
            n_threads = []
            with busy_processes(n_busy):
                before, children = usage(), _children_s()
                for turn in range(turns):
                    for i in (0, 1) if turn % 2 == 0 else (1, 0):
                        speeds[i].append(decode((adapting, fixed)[i], turn_s))
                    n_threads.append(n_threads_of(adapting))
                used, children = usage().since(before), _children_s() - children
            mine, other = (statistics.median(s) for s in speeds)
            strangers = max(0.0, used.busy - used.own - children) / used.wall
            rows.append(Row(name, n_busy, mine, other, mine / other, n_threads, strangers))
    finally:
        adapting.close()
        fixed.close()
    return rows


def _children_s() -> float:
    """Processor time of the busy processes so far, while they run."""
    import psutil

    return sum(sum(child.cpu_times()[:2]) for child in psutil.Process().children())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=6, help="of each side per row (default: %(default)s)")
    parser.add_argument("--turn-s", type=float, default=3.0, help="seconds of one turn (default: %(default)s)")
    parser.add_argument("--fixed", type=int, default=cpu.facts().threads, help="threads of the other (default: %(default)s)")
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2, 0], help="busy processes per row (default: 0 1 2 0)")
    parser.add_argument("--model", choices=("smollm2", "1b"), action="append", help="only this model; may be repeated")
    parser.add_argument("--json", type=Path, help="write the rows and the machine's facts to this file")
    args = parser.parse_args()
    rows: list[Row] = []
    for name, key, make in (
        ("SmolLM2-135M Q4_1", "smollm2", models.smollm2),
        ("Llama 1B shape, Q4_K_M", "1b", models.llama_1b),
    ):
        if key in (args.model or ["smollm2", "1b"]):
            print(f"{name} …", file=sys.stderr)
            rows += race(name, make(), args.fixed, args.busy, args.turns, args.turn_s)
    table = Table("model", "busy processes", "adapting tok/s", "fixed tok/s", "ratio", "its threads", "strangers' cores")
    table.title = f"Decoding beside busy processes, fixed: {args.fixed} threads"
    for row in rows:
        shown = " ".join(map(str, row.n_threads))
        figures = (f"{row.adapting:.1f}", f"{row.fixed:.1f}", f"{row.ratio:.2f}", shown, f"{row.strangers:.2f}")
        table.add_row(row.model, str(row.n_busy), *figures)
    console = Console(width=120)
    console.print(table)
    about = facts() | {"threads": args.fixed, "turns": args.turns, "turn_s": args.turn_s}
    console.print(about, soft_wrap=True)
    if args.json:
        args.json.write_text(json.dumps({"facts": about, "rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
