"""The life of each loaded model: its load begins, its process is watched, and ends. The only place that touches runners.

When a load begins and when a model goes is the scheduler's decision; it is told of what happens here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from puna.llm.watchdog import until_stalled
from puna.server.placing.admission import Others
from puna.server.placing.loaded import Loaded, State
from puna.server.placing.loading import Loading
from puna.server.placing.table import LoadedModels
from puna.server.placing.tasks import KeptTasks

log = logging.getLogger(__name__)


class Lifecycle:
    """*ready* is called when a model can be used, *gone* when its process has ended and its memory is free."""

    def __init__(
        self, models: LoadedModels, loading: Loading, stall_timeout: float, ready: Callable[[], None], gone: Callable[[], None]
    ) -> None:
        self._models = models
        self._loading = loading
        self._stall_timeout = stall_timeout
        self._ready, self._gone = ready, gone
        self._tasks = KeptTasks()

    def start(self, loaded: Loaded, others: Others) -> None:
        self._models[loaded.model.model_path] = loaded
        load = self._loading.load(loaded, others, self._tasks)
        loaded.task = asyncio.create_task(load, name=f"load {loaded.model.model_path.name}")
        self._tasks.run(self._watch(loaded))

    def close(self, loaded: Loaded) -> None:
        """Returns at once; the model is in the table until its process has ended."""
        if loaded.state is State.CLOSING:
            return
        loaded.state = State.CLOSING
        loaded.stop_timer()
        self._tasks.run(self._end(loaded))

    async def ended(self) -> None:
        """Returns when all processes that were to end are gone."""
        await self._tasks.ended()

    async def _watch(self, loaded: Loaded) -> None:
        """Follow a model from its load to the end of its process, whatever ends it."""
        assert loaded.task is not None
        await asyncio.wait({loaded.task})
        if loaded.task.cancelled() or loaded.task.exception() is not None:
            self._forget(loaded)
            return
        self._ready()
        runner = loaded.runner
        watchdog = asyncio.create_task(until_stalled(runner, self._stall_timeout))
        ended = asyncio.create_task(runner.wait())
        await asyncio.wait({watchdog, ended}, return_when=asyncio.FIRST_COMPLETED)
        if watchdog.done() and (reason := watchdog.result()):
            runner.give_up(reason)
        watchdog.cancel()
        await ended
        if loaded.state is not State.CLOSING:
            log.error("the runner of %s has ended", loaded.model.model_path.name)
            self.close(loaded)

    async def _end(self, loaded: Loaded) -> None:
        assert loaded.task is not None
        loaded.task.cancel()
        await asyncio.wait({loaded.task})
        if not loaded.task.cancelled() and loaded.task.exception() is None:
            await loaded.runner.close()
            if loaded.reply is not None:
                await self._loading.admission.suspect(loaded.model.model_path, loaded.runner, loaded.reply)
        self._forget(loaded)

    def _forget(self, loaded: Loaded) -> None:
        loaded.stop_timer()
        if self._models.get(loaded.model.model_path) is loaded:
            del self._models[loaded.model.model_path]
            loaded.state = State.CLOSING
            self._gone()
