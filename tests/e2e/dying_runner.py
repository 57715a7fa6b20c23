"""A real runner that dies, or lacks memory, at a certain moment: once, as the file says that DYING names ("PHASE WAY").

Run as a script it takes the place of ``puna runner``. Phases: load, prefill, decode. Ways: abort (the tensor library's own
abort), kill, memory (an allocation that is refused).
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

import puna.runner.engine as engine_module
from puna.native.library import opened
from puna.runner.engine import Engine
from puna.runner.loading.load import Loaded, read_weights
from puna.runner.process.main import main
from puna.runner.tasks.completion import Request


def die(way: str) -> None:
    if way == "abort":
        opened()._short["ggml-base"].ggml_abort(b"dying_runner.c", 7, b"the tensor library gives up")
    elif way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 20, limits[1]))
    try:
        np.ones(1 << 27)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


class DyingEngine(Engine):
    """Dies in the first step of its phase."""

    phase, way = "", ""

    def _compute(self, loaded: Loaded, chosen: list[tuple[Request, int]]) -> None:
        phase = "prefill" if any(count > 1 for _, count in chosen) else "decode"
        if phase == self.phase:
            DyingEngine.phase = ""
            die(self.way)
        super()._compute(loaded, chosen)


def make(path: Path) -> Engine:
    plan = Path(os.environ["DYING"])
    if plan.exists():
        DyingEngine.phase, DyingEngine.way = plan.read_text().split()
        plan.unlink()
    if DyingEngine.phase == "load":

        def read_and_die(loaded: Loaded, progress: Callable[[float], None]) -> None:
            die(DyingEngine.way)
            read_weights(loaded, progress)

        vars(engine_module)["read_weights"] = read_and_die
    return DyingEngine(path)


if __name__ == "__main__":
    main(sys.argv[1:], make)
