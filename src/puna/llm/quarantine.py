"""What becomes of GPUs on which a runner has crashed while it loaded: whom to blame, and for how long.

Drivers and the code made for them do not fail as errors but end the process. Whether the GPUs were to blame shows when the
same model loads without them; their library is then left alone for a while, since every load would crash again.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

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
    """Libraries whose GPUs are left alone."""

    clock: Callable[[], float] = time.monotonic
    _until: dict[str, float] = field(default_factory=dict)

    def add(self, libraries: Iterable[str]) -> None:
        self._until.update(dict.fromkeys(libraries, self.clock() + QUARANTINE_S))

    def lift(self, libraries: Iterable[str]) -> None:
        for library in libraries:
            self._until.pop(library, None)

    @property
    def libraries(self) -> frozenset[str]:
        now = self.clock()
        return frozenset(library for library, until in self._until.items() if until > now)
