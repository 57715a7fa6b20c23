"""How much of the processor is taken, and how much of that by this process. Times in seconds since some beginning."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import psutil

from puna.native.cpu import usable_cores


@dataclass(frozen=True)
class Usage:
    wall: float
    busy: float  # computing time of all processes on the cores that this one may use, those that yield to it excepted
    own: float  # of it, this process's

    def since(self, before: Usage) -> Usage:
        return Usage(self.wall - before.wall, self.busy - before.busy, self.own - before.own)


def usage() -> Usage:
    """Whoever made itself nice yields to a process that did not; waiting for a disk and what a hypervisor took is no work."""
    own = os.times()
    cores = psutil.cpu_times(percpu=True)
    if hasattr(os, "sched_getaffinity") and usable_cores() < len(cores):
        cores = [cores[i] for i in os.sched_getaffinity(0) if i < len(cores)]
    names = ["user", "system", "irq", "softirq"]
    if _is_nice():
        names.append("nice")
    return Usage(time.monotonic(), sum(getattr(core, name, 0.0) for core in cores for name in names), own.user + own.system)


def _is_nice() -> bool:
    return hasattr(os, "getpriority") and os.getpriority(os.PRIO_PROCESS, 0) > 0
