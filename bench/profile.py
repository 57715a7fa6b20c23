"""Where the milliseconds of a step go: what each kind of node takes, in Puna's engine and in libllama.

Nodes are computed one by one, each after the one before is done, which takes longer than a step as a whole: what threads need to
begin and to end a node is in each. So the step as a whole is measured beside it, and the nodes' times are to be read as shares.
GB/s are of the weights that a node reads.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from tests.oracle import Oracle
from tests.puna_engine import PunaEngine

from bench import models
from bench.facts import facts
from puna.native.ggml import ggml_tensor
from puna.native.kernels.library import kernels
from puna.native.library import opened
from puna.native.log import route_to_logging

PROMPT, DEPTH = 512, 64
FILES: dict[str, Callable[[], Path]] = {"smollm2": models.smollm2, "1b": models.llama_1b}
NOTHING = (b"VIEW", b"RESHAPE", b"PERMUTE", b"TRANSPOSE")  # to compute
CALLBACK = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)


@dataclass
class Clock:
    now: Callable[[], float] = time.perf_counter


clock = Clock()


@dataclass
class Kind:
    """Nodes that do the same in every layer."""

    n: int = 0
    seconds: float = 0.0
    n_bytes: int = 0


@dataclass
class Watch:
    """Told of every node before and after it is computed."""

    kinds: dict[str, Kind] = field(default_factory=lambda: defaultdict(Kind))
    _began: float = 0.0

    def __post_init__(self) -> None:
        library = ctypes.CDLL(str(opened().paths["ggml-base"]))
        self._n_bytes = library.ggml_nbytes
        self._n_bytes.restype, self._n_bytes.argtypes = ctypes.c_size_t, [ctypes.c_void_p]
        self._op_name = library.ggml_op_desc
        self._op_name.restype, self._op_name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
        self._set = library.ggml_backend_sched_set_eval_callback
        self._set.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
        self._nodes = {address: name for name, address in kernels().nodes.items()}
        self._callback = CALLBACK(self._called)

    @property
    def address(self) -> int:
        return ctypes.cast(self._callback, ctypes.c_void_p).value or 0

    def _called(self, address: int, is_before: bool, _data: object) -> bool:
        if is_before:
            self._began = clock.now()
            return self._op_name(address) not in NOTHING
        seconds = clock.now() - self._began
        node = ggml_tensor.from_address(address)
        weights = [s for s in node.src if s and b"weight" in ggml_tensor.from_address(s).name]
        name = self._name(address, node, weights)
        kind = self.kinds[name]
        kind.n += 1
        kind.seconds += seconds
        if not name.startswith(("rows", "get_rows")):  # a few of all
            kind.n_bytes += sum(self._n_bytes(weight) for weight in weights)
        return True

    def _name(self, address: int, node: ggml_tensor, weights: list[int]) -> str:
        what = self._op_name(address).decode().lower()
        if what == "custom":
            function = int(np.array(node.op_params[:2], np.int32).view(np.int64)[0])
            what = self._nodes.get(function, what).removeprefix("puna_").removesuffix("_node")
        names = [re.sub(r"^blk\.\d+\.|\.weight$", "", ggml_tensor.from_address(w).name.decode()) for w in weights]
        return f"{what} {' + '.join(dict.fromkeys(names))}".strip()

    @contextmanager
    def on(self, schedulers: list[int]) -> Iterator[None]:
        for scheduler in schedulers:
            self._set(scheduler, self.address, None)
        try:
            yield
        finally:
            for scheduler in schedulers:
                self._set(scheduler, None, None)


def decode(engine: PunaEngine | Oracle, ids: list[int], n: int) -> None:
    at = 0 if n > 1 else DEPTH
    engine.forget(0, at)
    engine.decode(ids[:n], range(at, at + n), [0] * n, [n - 1])


def whole(engine: PunaEngine | Oracle, ids: list[int], n: int, steps: int) -> float:
    """Median seconds of a step."""
    times = []
    for _ in range(steps + 1):
        begin = clock.now()
        decode(engine, ids, n)
        times.append(clock.now() - begin)
    return statistics.median(times[1:])  # the first builds the graph


def table_of(title: str, watch: Watch, steps: int, seconds: float) -> Table:
    together = sum(kind.seconds for kind in watch.kinds.values()) / steps
    table = Table("nodes", "of a step", "ms", "share", "GB/s", title=title)
    table.caption = f"{together * 1000:.2f} ms node by node; the step as a whole {seconds * 1000:.2f} ms"
    for name, kind in sorted(watch.kinds.items(), key=lambda item: -item[1].seconds):
        ms, rate = kind.seconds / steps * 1000, kind.n_bytes / kind.seconds / 1e9
        table.add_row(name, str(kind.n // steps), f"{ms:.3f}", f"{ms / together / 10:.1f} %", f"{rate:.1f}" if rate else "")
    return table


def profile(name: str, path: Path, contender: str, n: int, steps: int, n_threads: int) -> Table:
    ids = np.random.default_rng(0).integers(5, 300, PROMPT).tolist()
    limits: dict[str, Any] = {"n_ctx": 2 * PROMPT, "n_threads": n_threads}
    watch = Watch()
    what = f"{name}, {f'prompt of {n}' if n > 1 else f'a token at depth {DEPTH}'}: {contender}"
    if contender == "Puna":
        with PunaEngine(path, **limits) as puna:
            decode(puna, ids, DEPTH)
            seconds = whole(puna, ids, n, steps)
            with watch.on(list(puna.backend._schedulers.values())):
                for _ in range(steps):
                    decode(puna, ids, n)
        return table_of(what, watch, steps, seconds)
    with Oracle(path, **limits) as oracle:
        decode(oracle, ids, DEPTH)
        seconds = whole(oracle, ids, n, steps)
    with Oracle(path, **limits, watch=watch.address) as oracle:
        for n_before in (DEPTH, n):
            decode(oracle, ids, n_before)
        watch.kinds.clear()
        for _ in range(steps):
            decode(oracle, ids, n)
    return table_of(what, watch, steps, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=FILES, action="append", help="only this model; may be repeated")
    parser.add_argument("--contender", choices=("Puna", "libllama"), action="append", help="only this one")
    parser.add_argument("--tokens", type=int, choices=(1, PROMPT), action="append", help="only a token, or only a prompt")
    parser.add_argument("--steps", type=int, default=10, help="of which the mean is shown; a prompt: a fifth of them")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--cpu-time", action="store_true", help="one thread's time on a core, for machines that others use as well"
    )
    args = parser.parse_args()
    route_to_logging()
    if args.cpu_time:
        args.threads, clock.now = 1, time.thread_time
    console = Console(width=120)
    for name in args.model or FILES:
        for n in args.tokens or (1, PROMPT):
            for contender in args.contender or ("Puna", "libllama"):
                steps = args.steps if n == 1 else max(1, args.steps // 5)
                console.print(profile(name, FILES[name](), contender, n, steps, args.threads))
    console.print(facts() | {"threads": args.threads, "steps": args.steps}, soft_wrap=True)


if __name__ == "__main__":
    main()
