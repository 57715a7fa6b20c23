"""How much of the processor is taken, how much of that by this process, and how long its threads waited for their turn.

Times in seconds since some beginning.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from puna.host import usable_cores

TASKS = Path("/proc/self/task")


@dataclass(frozen=True)
class Usage:
    wall: float
    busy: float  # computing time of all processes on the cores that this one may use
    own: float  # of it, this process's
    waited: float | None = None  # time that its threads other than the first could have run and did not; None: unknown

    def since(self, before: Usage) -> Usage:
        waited = None if self.waited is None or before.waited is None else max(0.0, self.waited - before.waited)
        return Usage(self.wall - before.wall, self.busy - before.busy, self.own - before.own, waited)


def usage() -> Usage:
    """Nice processes count in full: where sessions or control groups have shares, they yield to nobody outside their own.

    Waiting for a disk is no work, nor is what a hypervisor took.
    """
    own = os.times()
    cores = psutil.cpu_times(percpu=True)
    if hasattr(os, "sched_getaffinity") and usable_cores() < len(cores):
        cores = [cores[i] for i in os.sched_getaffinity(0) if i < len(cores)]
    names = ("user", "nice", "system", "irq", "softirq")
    busy = sum(getattr(core, name, 0.0) for core in cores for name in names)
    return Usage(time.monotonic(), busy, own.user + own.system, _waited())


def _waited() -> float | None:
    """The second number of schedstat: nanoseconds in the queue for a core (Linux, Documentation/scheduler/sched-stats)."""
    total = 0
    try:
        for task in os.listdir(TASKS):
            if int(task) != os.getpid():  # the first thread speaks with the outside: it does not compute
                total += int((TASKS / task / "schedstat").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return total / 1e9
