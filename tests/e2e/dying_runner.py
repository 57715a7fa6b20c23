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
from typing import Any

import numpy as np

import puna.runner.engine as engine_module
import puna.runner.loading.loader as loader_module
from puna.native.library import opened
from puna.runner.engine import Engine, StepLoop
from puna.runner.loading.load import Loaded, read_weights
from puna.runner.process.main import main
from puna.runner.scheduling.scheduler import Plan


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


class DyingLoop(StepLoop):
    """Dies in the first step of its phase."""

    phase, way = "", ""

    def _compute(self, plan: Plan[Any]) -> None:
        phase = "prefill" if any(part.n_tokens > 1 for part in plan.parts) else "decode"
        if phase == self.phase:
            DyingLoop.phase = ""
            die(self.way)
        super()._compute(plan)


def make(path: Path) -> Engine:
    plan = Path(os.environ["DYING"])
    if plan.exists():
        DyingLoop.phase, DyingLoop.way = plan.read_text().split()
        plan.unlink()
    if DyingLoop.phase == "load":

        def read_and_die(loaded: Loaded, progress: Callable[[float], None]) -> None:
            die(DyingLoop.way)
            read_weights(loaded, progress)

        vars(loader_module)["read_weights"] = read_and_die
    vars(engine_module)["StepLoop"] = DyingLoop
    return Engine(path)


if __name__ == "__main__":
    main(sys.argv[1:], make)
