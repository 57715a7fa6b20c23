"""One idle runner process that is ready before it is needed, so that a load does not wait for a process to start.

It has imported everything and opened the tensor library, and knows no model. The next load takes it; another is started
once that load is over, so that the two do not compete. A spare that dies is no loss: the load starts a process as if
there had been none. The spare ends with the server as every runner does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextvars import Context
from pathlib import Path

from puna import wire
from puna.errors import LoadError, PunaError
from puna.host import private_bytes
from puna.llm.early import SPARE_COMMAND, Begun
from puna.llm.runner import Runner, command_for

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 10.0  # for a spare that is being used; a process that is being started may take as long
REFILL_DELAY_S = 1.0  # after a load, for the first answer
_POLL_S = 0.25


class Spare:
    """*refill*: whether a spare that was used is replaced. *begun* is the first one's process. Belongs to one event loop."""

    def __init__(
        self,
        *,
        refill: bool = True,
        command: Sequence[str] = SPARE_COMMAND,
        command_for_model: Callable[[Path], Sequence[str]] = command_for,
        begun: Begun | None = None,
    ) -> None:
        self._refill = refill
        self._begun = begun
        self._command = command
        self._command_for_model = command_for_model
        self._starting: asyncio.Task[Runner] | None = None
        self._refilling: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def start(self) -> None:
        """Begin to start one if there is none; returns at once."""
        if self._starting is None and not self._is_closed:
            begun, self._begun = self._begun, None
            start = Runner.start(self._command) if begun is None else Runner.adopt(begun)
            self._starting = asyncio.create_task(start, name="spare runner")
            self._starting.add_done_callback(_log_failure)

    @property
    def pid(self) -> int:
        """The idle process; 0 when there is none."""
        runner = self._started
        return runner.pid if runner is not None and runner.is_alive else 0

    @property
    def private_bytes(self) -> int:
        """What the idle process takes of the memory; 0 when there is none."""
        return private_bytes(self.pid) if self.pid else 0

    @property
    def _started(self) -> Runner | None:
        task = self._starting
        return task.result() if task is not None and task.done() and not task.cancelled() and not task.exception() else None

    async def devices(self) -> wire.Discovery | None:
        """What this machine computes on, as the spare sees it: its process opens the tensor library anyway.

        None where there is no spare, or none that answers: drivers may have ended it.
        """
        starting = self._starting
        if starting is None:
            return None
        try:
            runner = await asyncio.shield(starting)
            return await runner.devices(ANSWER_TIMEOUT_S)
        except PunaError as error:
            log.warning("the spare runner cannot tell the devices: %s", error)
            return None

    async def launch(self, model_path: Path) -> Runner:
        """A runner for this model: the spare, or one that is started now.

        Errors: LoadError when no process can be started.
        """
        if self._is_closed:
            raise LoadError("the server is shutting down")
        runner = await self._take(model_path) or await Runner.start(self._command_for_model(model_path))
        if self._refill:
            # Of no request: the next spare's log would carry the number of this one.
            task = asyncio.create_task(self._refill_after(runner), name="refill of the spare runner", context=Context())
            self._refilling.add(task)
            task.add_done_callback(self._refilling.discard)
        return runner

    async def _take(self, model_path: Path) -> Runner | None:
        starting, self._starting = self._starting, None
        if starting is None:
            return None
        try:
            runner = await starting
        except LoadError:
            return None
        except asyncio.CancelledError:
            await _end(starting)  # it may have started all the same
            raise
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await runner.name_model(model_path)
                await runner.health()
        except PunaError as error:
            log.warning("the spare runner cannot be used, another process is started: %s", error)
            await runner.close()
            return None
        except TimeoutError:
            runner.give_up(f"the spare has not answered within {ANSWER_TIMEOUT_S:g} s")
            await runner.close()
            return None
        except BaseException:
            await runner.close()
            raise
        return runner

    async def _refill_after(self, runner: Runner) -> None:
        """Start another once *runner* has loaded its model or ended."""
        try:
            while runner.is_alive and (await runner.health()).status in ("launched", "loading"):
                await asyncio.sleep(_POLL_S)
        except PunaError as error:
            log.debug("the load that took the spare runner has failed: %s", error)
        await asyncio.sleep(REFILL_DELAY_S)
        self.start()

    async def close(self) -> None:
        """End the spare and wait for it; none is started any more."""
        self._is_closed = True
        for task in self._refilling:
            task.cancel()
        starting, self._starting = self._starting, None
        if starting is not None:
            await _end(starting)
        await asyncio.gather(*self._refilling, return_exceptions=True)


async def _end(starting: asyncio.Task[Runner]) -> None:
    starting.cancel()
    await asyncio.wait({starting})
    if not starting.cancelled() and starting.exception() is None:
        await starting.result().close()


def _log_failure(task: asyncio.Task[Runner]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("no spare runner: %s", error)
