"""A model's load in a process of its own; where that crashes on GPUs, once more without those of their libraries.

How much memory a model gets is puna.server.placing.admission's business.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from puna.errors import RunnerDied
from puna.llm.quarantine import QUARANTINE_S, CrashedOnGPUs
from puna.llm.runner import Runner, command_for
from puna.server.placing.admission import Admission, Others
from puna.server.placing.loaded import Loaded, State
from puna.server.placing.tasks import KeptTasks

log = logging.getLogger(__name__)

Launch = Callable[[Path], Awaitable[Runner]]


async def launch_runner(model_path: Path) -> Runner:
    return await Runner.start(command_for(model_path))


@dataclass(frozen=True)
class Loading:
    launch: Launch
    admission: Admission

    async def load(self, loaded: Loaded, others: Others, tasks: KeptTasks) -> Runner:
        """*tasks* end a process that is not needed after all.

        Errors: what starting a runner and loading raise; RunnerDied where it crashes whichever GPUs are left alone.
        """
        begin = time.monotonic()
        blamed: set[str] = set()  # libraries of GPUs on which it has crashed
        try:
            runner = await self._load_somewhere(loaded, others, blamed, tasks)
        except BaseException:
            loaded.state = State.CLOSING
            raise
        loaded.state = State.READY
        if blamed:
            self.admission.quarantine.add(blamed)
            names = ", ".join(sorted(blamed))
            log.warning("GPUs of %s are left alone for %g minutes unless num_gpu asks for them", names, QUARANTINE_S / 60)
        memory = loaded.reply.memory if loaded.reply else None
        size = f"{memory.total / 1e6:.0f} MB, {memory.on_gpus / 1e6:.0f} of them on GPUs" if memory else "of unknown size"
        log.info("loaded %s in %.2f s: %s", loaded.model.model_path.name, time.monotonic() - begin, size)
        return runner

    async def _load_somewhere(self, loaded: Loaded, others: Others, blamed: set[str], tasks: KeptTasks) -> Runner:
        while True:
            try:
                return await self._try_load(loaded, others, blamed, tasks)
            except CrashedOnGPUs as crash:
                if loaded.requirements.num_gpu is not None or crash.libraries <= blamed:
                    where = ", ".join(crash.devices)
                    raise RunnerDied(f"{crash} (while layers were loaded onto {where}; num_gpu 0 loads none)") from crash
                blamed |= crash.libraries
                log.warning(
                    "loading %s on %s has crashed its runner, it is loaded without GPUs of %s: %s",
                    *(loaded.model.model_path.name, ", ".join(crash.devices), ", ".join(sorted(blamed)), crash),
                )

    async def _try_load(self, loaded: Loaded, others: Others, without: Collection[str], tasks: KeptTasks) -> Runner:
        """In a new process; GPUs of the libraries *without* are not used, nor those in quarantine unless they were asked for."""
        runner = await self.launch(loaded.model.model_path)
        if loaded.requirements.num_gpu is None:
            without = self.admission.quarantine.libraries(loaded.model.model_path).union(without)
        try:
            loaded.process = runner
            loaded.reply = await self.admission.load(runner, loaded.requirements, others, without)
            await self.admission.read_weights(runner, loaded.reply)
        except BaseException as error:
            if isinstance(error, CrashedOnGPUs):
                loaded.process = loaded.reply = None
            else:
                loaded.state = State.CLOSING
            await asyncio.shield(tasks.run(runner.close()))
            raise
        return runner
