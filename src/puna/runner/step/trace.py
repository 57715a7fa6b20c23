"""One line of JSON for each step, into a file: what was computed for whom, and how long that took. For people who look on."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from puna.kvcache.cache import Sequences
from puna.runner.scheduling.scheduler import Plan

log = logging.getLogger(__name__)


class Trace:
    """Belongs to the engine's thread. Each line is whole as soon as its step is over."""

    def __init__(self, path: Path) -> None:
        """Errors: OSError when the file cannot be written."""
        self._file = path.open("wb", buffering=0)

    def write(self, step: int, plan: Plan[Any], took_s: float, cache: Sequences, *, n_running: int, n_waiting: int) -> None:
        """Before the tasks forget what they were. Never raises: who looks on must not be in the way."""
        line = {
            "step": step,
            "ms": round(took_s * 1e3, 3),
            "tokens": plan.n_tokens,
            "running": n_running,
            "waiting": n_waiting,
            "cells": cache.n_cells,
            "free": cache.n_free if cache.n_cells else 0,
            "parts": [
                {
                    "task": task.order,
                    "slot": task.slot,
                    "begin": begin,
                    "tokens": n_tokens,
                    "outputs": len(task.output_rows(begin, n_tokens)),
                    "prompt": task.n_prompt,
                    "generated": task.n_generated,
                }
                for task, begin, n_tokens in plan.parts
            ],
        }
        try:
            self._file.write(json.dumps(line).encode() + b"\n")
        except (OSError, ValueError) as error:  # full, or closed
            log.warning("step %d could not be traced: %s", step, error)

    def close(self) -> None:
        self._file.close()
