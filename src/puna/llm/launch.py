"""Starts the runner process of a load: from the spare if there is one, and not at once if the last ones crashed in a row.

Where drivers end every process that opens them, the search for devices has found that out: runners are kept from them.
Whether and when a model is loaded is the scheduler's business, and what it is loaded with.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from puna import environment
from puna.errors import LoadError, Overloaded
from puna.llm.discovery import Machine
from puna.llm.early import Begun
from puna.llm.runner import Runner, command_for
from puna.llm.spare import Spare

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 16.0
PATIENCE_S = 2.0  # a request that would wait longer is refused
FORGET_S = 60.0


@dataclass
class Backoff:
    """How long to wait before a model is loaded again whose runner keeps crashing.

    The first reload is immediate; the pause doubles with each crash of a runner that had answered nothing since its start.
    Where all is quiet for FORGET_S it is as if nothing had happened.
    """

    clock: Callable[[], float] = time.monotonic
    _crashes: dict[Path, tuple[int, float]] = field(default_factory=dict)  # in a row, and when the last was

    def ended(self, model_path: Path, *, has_crashed: bool, has_served: bool) -> None:
        """Note that a runner of the model has ended; *has_crashed*: although nobody closed it."""
        before = 0 if has_served else self.crashes_in_a_row(model_path)
        if has_crashed:
            self._crashes[model_path] = (before + 1, self.clock())
        elif has_served:
            self._crashes.pop(model_path, None)

    def crashes_in_a_row(self, model_path: Path) -> int:
        count, last = self._crashes.get(model_path, (0, 0.0))
        if count and self.clock() - last > FORGET_S:
            del self._crashes[model_path]
            return 0
        return count

    def pause_s(self, model_path: Path) -> float:
        """Seconds from now."""
        count = self.crashes_in_a_row(model_path)
        if count < 2:
            return 0.0
        pause_s = min(FIRST_PAUSE_S * 2.0 ** min(count - 2, 10), LONGEST_PAUSE_S)
        return max(0.0, self._crashes[model_path][1] + pause_s - self.clock())


async def start(model_path: Path) -> Runner:
    return await Runner.start(command_for(model_path))


async def start_with(model_path: Path, environ: Mapping[str, str]) -> Runner:
    return await Runner.start(command_for(model_path), environ={**environment.for_computing(), **environ})


def for_one_model(begun: Begun | None = None, *, has_spare: bool = True) -> Launcher:
    """For who loads one model, once: its runner stands ready, and tells the devices. *begun*: it was started already."""
    spare = Spare(refill=False, begun=begun) if has_spare else None
    return Launcher(spare, machine=Machine(ask=spare.devices if spare else None))


class Launcher:
    """Belongs to one event loop. *start* is used where there is no spare.

    *start_with* is used where *machine* has an environment for runners.
    """

    def __init__(
        self,
        spare: Spare | None = None,
        start: Callable[[Path], Awaitable[Runner]] = start,
        *,
        machine: Machine | None = None,
        start_with: Callable[[Path, Mapping[str, str]], Awaitable[Runner]] = start_with,
    ) -> None:
        self.spare = spare
        self.machine = machine
        self._start = start
        self._start_with = start_with
        self._backoff = Backoff()
        self._endings: dict[Path, str] = {}  # how the last runner of a model ended that crashed
        self._watching: set[asyncio.Task[None]] = set()

    async def launch(self, model_path: Path) -> Runner:
        """Errors: LoadError when no process can be started; Overloaded when it is too early after crashes in a row."""
        if pause_s := self._backoff.pause_s(model_path):
            report = (
                f"the runner of {model_path.name} has crashed {self._backoff.crashes_in_a_row(model_path)} times in a row, "
                f"the last time with {self._endings.get(model_path)}; it is started again in {pause_s:.1f} s"
            )
            if pause_s > PATIENCE_S:
                raise Overloaded(report)
            log.warning("%s", report)
            await asyncio.sleep(pause_s)
        runner = await self._process_for(model_path)
        log.info("runner %d is to run %s", runner.pid, model_path.name)
        task = asyncio.create_task(self._watch(model_path, runner), name=f"end of runner {runner.pid}")
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)
        return runner

    async def _process_for(self, model_path: Path) -> Runner:
        if self.machine is None:
            return await self._usual_process_for(model_path)
        if self.machine.environ:
            await self.machine.look()  # drivers may be sound again
        if not self.machine.environ:
            runner = await self._usual_process_unless_drivers_end_it(model_path, self.machine)
            if runner is not None:
                return runner
        return await self._start_with(model_path, self.machine.environ)

    async def _usual_process_unless_drivers_end_it(self, model_path: Path, machine: Machine) -> Runner | None:
        """Started while the search for devices may still be on: the load cannot do without it, and this takes time, too."""
        try:
            runner = await self._usual_process_for(model_path)
        except LoadError:
            await machine.look()
            if not machine.environ:
                raise
            return None
        try:
            await machine.look()
        except BaseException:
            await runner.close()
            raise
        if not machine.environ:
            return runner
        await runner.close()
        return None

    async def _usual_process_for(self, model_path: Path) -> Runner:
        return await (self.spare.launch(model_path) if self.spare else self._start(model_path))

    async def _watch(self, model_path: Path, runner: Runner) -> None:
        ending = await runner.ending()
        self._backoff.ended(model_path, has_crashed=runner.has_crashed, has_served=runner.has_served)
        if runner.has_crashed:
            self._endings[model_path] = ending

    def open(self) -> None:
        """Begin to start the spare."""
        if self.spare is not None:
            self.spare.start()

    async def close(self) -> None:
        """Return when the spare's process is gone; the runners that were launched are their owners'."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        if self.spare is not None:
            await self.spare.close()
