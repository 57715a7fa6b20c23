"""Decoding beside other busy processes: threads that adapt, a fixed number of them, and libllama with as many.

Each contender is a process of its own, since how OpenMP's threads wait is one setting of a process; all are told to look as
often as Puna's are before they sleep, which is less than llama.cpp's own programs do and better for them here. They take turns
at decoding one sequence, beside no busy process, one, two, and none again. Above 1 the adapting one is faster.
"""

from __future__ import annotations

import argparse
import os
import queue
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from tests.oracle import Oracle

from bench import models
from bench.facts import facts
from bench.report import report
from puna.native import cpu
from puna.native.library import SPIN_COUNT
from puna.native.log import route_to_logging
from puna.runner.engine import Engine
from puna.wire import CompletionReply, CompletionRequest, Done, LoadOptions, LoadRequest, Piece, SamplingOptions

N_CTX = 2048
SETTLE_S = 1.0  # for processes that start or end
MODELS = {"smollm2": ("SmolLM2-135M Q4_1", models.smollm2), "1b": ("Llama 1B shape, Q4_K_M", models.llama_1b)}
KINDS = ("adapting", "fixed", "libllama")


@dataclass
class Row:
    model: str
    n_busy: int
    tokens_per_s: dict[str, float]  # median of the turns, by contender
    first: dict[str, float]  # of the first turn, when the busy processes are new
    ratio: float  # the adapting one's by libllama's


Decode = Callable[[float], float]  # for so many seconds; how many tokens a second


def engine_decode(path: Path, n_threads: int) -> Decode:
    """*n_threads* 0: as the engine itself finds right."""
    engine = Engine(path)
    reply = engine.load(LoadRequest(options=LoadOptions(n_ctx=N_CTX, n_parallel=1, n_threads=n_threads)))
    if not reply.success:
        sys.exit(reply.error)
    while engine.health().status != "ready":
        time.sleep(0.01)

    def decode(seconds: float) -> float:
        replies: queue.SimpleQueue[CompletionReply] = queue.SimpleQueue()
        sampling = SamplingOptions(temperature=0.0)
        request = CompletionRequest(prompt="Once upon a time", n_predict=100_000, ignore_eos=True, shift=True, sampling=sampling)
        handle = engine.submit(request, replies.put)
        reply = replies.get(timeout=60)
        time.sleep(seconds)
        handle.cancel()
        while isinstance(reply, Piece):
            reply = replies.get(timeout=60)
        if not isinstance(reply, Done) or not reply.eval_count:
            sys.exit(f"no tokens: {reply}")
        return reply.eval_count / (reply.eval_duration / 1e9)

    return decode


def oracle_decode(path: Path, n_threads: int) -> Decode:
    oracle = Oracle(path, n_ctx=N_CTX, n_threads=n_threads)

    def decode(seconds: float) -> float:
        oracle.forget()
        row = oracle.decode([1, 2, 3, 4], range(4), [0] * 4, [3])[0]
        begin, n = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds and n < N_CTX - 4:
            row = oracle.decode([int(row.argmax())], [4 + n], [0], [0])[0]
            n += 1
        return n / (time.perf_counter() - begin)

    return decode


def contend(kind: str, path: Path, n_threads: int) -> None:
    """A contender's process: for each line with seconds one with a speed."""
    route_to_logging()
    decode = oracle_decode(path, n_threads) if kind == "libllama" else engine_decode(path, 0 if kind == "adapting" else n_threads)
    decode(0.3)
    print("ready", flush=True)
    for line in sys.stdin:
        print(decode(float(line)), flush=True)
    os._exit(0)


class Contender:
    def __init__(self, kind: str, path: Path, n_threads: int) -> None:
        command = [sys.executable, "-m", "bench.contention", "--contend", kind, "--file", str(path), "--fixed", str(n_threads)]
        environ = {**os.environ, "GOMP_SPINCOUNT": str(SPIN_COUNT)}
        self._process = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def _answer(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            sys.exit("a contender ended")
        return line

    def decode(self, seconds: float) -> float:
        assert self._process.stdin
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


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


def race(name: str, path: Path, n_fixed: int, counts: list[int], turns: int, turn_s: float) -> list[Row]:
    rows = []
    with ExitStack() as stack:
        contenders = {kind: Contender(kind, path, n_fixed) for kind in KINDS}
        for contender in contenders.values():
            stack.callback(contender.close)
        for n_busy in counts:
            speeds: dict[str, list[float]] = {kind: [] for kind in KINDS}
            with busy_processes(n_busy):
                for turn in range(turns):
                    for kind in KINDS if turn % 2 == 0 else reversed(KINDS):
                        speeds[kind].append(contenders[kind].decode(turn_s))
            medians = {kind: statistics.median(of_turns) for kind, of_turns in speeds.items()}
            first = {kind: of_turns[0] for kind, of_turns in speeds.items()}
            rows.append(Row(name, n_busy, medians, first, medians["adapting"] / medians["libllama"]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=4, help="of each contender per row (default: %(default)s)")
    parser.add_argument("--turn-s", type=float, default=1.5, help="seconds of one turn (default: %(default)s)")
    parser.add_argument("--fixed", type=int, default=cpu.facts().threads, help="threads of the others (default: %(default)s)")
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2, 0], help="busy processes per row (default: 0 1 2 0)")
    parser.add_argument("--model", choices=MODELS, action="append", help="only this model; may be repeated")
    parser.add_argument("--json", type=Path, help="write the rows and the machine's facts to this file")
    parser.add_argument("--contend", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contend:
        contend(args.contend, args.file, args.fixed)
    rows: list[Row] = []
    for key in args.model or MODELS:
        name, make = MODELS[key]
        print(f"{name} …", file=sys.stderr)
        rows += race(name, make(), args.fixed, args.busy, args.turns, args.turn_s)
    table = Table("model", "busy processes", *(f"{kind} tok/s (first turn)" for kind in KINDS), "adapting / libllama")
    table.title = f"Decoding beside busy processes, fixed and libllama: {args.fixed} threads"
    for row in rows:
        shown = (f"{row.tokens_per_s[kind]:.1f} ({row.first[kind]:.1f})" for kind in KINDS)
        table.add_row(row.model, str(row.n_busy), *shown, f"{row.ratio:.2f}")
    about = facts() | {"threads": args.fixed, "turns": args.turns, "turn_s": args.turn_s}
    report([table], about, rows, args.json, width=140)


if __name__ == "__main__":
    main()
