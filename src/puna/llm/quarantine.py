"""What becomes of GPUs on which a runner has crashed: whom to blame, and for how long.

Drivers and the code made for them do not fail as errors but end the process. Whether the GPUs were to blame for a load that
crashed shows when the same model loads without them; their library is then left alone for a while, since every load would
crash again. Code that a GPU cannot run is met only when something is computed: a runner that crashes before it has answered
anything makes them suspect for its model alone.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from puna.errors import RunnerDied
from puna.llm.runner import Runner

QUARANTINE_S = 600.0
ENDING_TIMEOUT_S = 10.0  # for a process that has closed its connection; writing an image of its memory takes seconds

# By which people and the system end a process; what else ends it is its own doing.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class CrashedOnGPUs(RunnerDied):
    """A runner crashed while it had layers on GPUs of these libraries."""

    def __init__(self, reason: str, devices: Iterable[str], libraries: Iterable[str]) -> None:
        super().__init__(reason)
        self.devices = sorted(devices)
        self.libraries = frozenset(libraries)


async def has_crashed_by_itself(runner: Runner) -> bool:
    """Whether a runner that no longer answers has ended although nobody ended it."""
    try:
        async with asyncio.timeout(ENDING_TIMEOUT_S):
            code = await runner.wait()
    except TimeoutError:
        return False
    return runner.has_crashed and -code not in _FROM_OUTSIDE


@dataclass
class Quarantine:
    """Libraries whose GPUs are left alone, by all models or by one."""

    clock: Callable[[], float] = time.monotonic
    _until: dict[tuple[str, Path | None], float] = field(default_factory=dict)

    def add(self, libraries: Iterable[str], model: Path | None = None) -> None:
        until = self.clock() + QUARANTINE_S
        self._until.update({(library, model): until for library in libraries})

    def lift(self, libraries: Iterable[str]) -> None:
        """For all models but those that suspect them."""
        for library in libraries:
            self._until.pop((library, None), None)

    def libraries(self, model: Path | None = None) -> frozenset[str]:
        now = self.clock()
        self._until = {key: until for key, until in self._until.items() if until > now}
        return frozenset(library for library, whose in self._until if whose is None or whose == model)
