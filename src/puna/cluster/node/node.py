"""The models of one machine, held for the heads that ask for them: the server's own scheduler, without the server.

How much memory a model gets here, on which devices it lies and what leaves for it is decided as on a machine that is alone.
Knows nothing of Ray, and of other nodes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from puna import host, packed_files
from puna.cluster.messages import Model
from puna.cluster.node.files import located
from puna.cluster.node.replicas import Replica, Replicas
from puna.llm.discovery import Machine
from puna.llm.launch import Launcher
from puna.llm.load import HOST_CACHE_SHARE, LoadRequirements
from puna.llm.spare import Spare
from puna.server.placing.loaded import Loaded
from puna.server.placing.scheduler import Scheduler
from puna.settings import Settings
from puna.store.store import Store

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Weights:
    model_path: Path


@dataclass(frozen=True)
class Memory:
    free: int
    total: int


class Node:
    """*memory_limit*: bytes of the host that its models may take in all, as Ray was told; 0: as much as the machine has."""

    def __init__(self, settings: Settings, *, memory_limit: int = 0, launcher: Launcher | None = None) -> None:
        self.settings = settings
        self.store = Store(settings.models, keep_unused=settings.no_prune)
        self.machine = (launcher.machine if launcher else None) or Machine()
        self._launcher = launcher or Launcher(Spare() if settings.warm_spare else None, machine=self.machine)
        self.scheduler = Scheduler(settings, self._launcher.launch, self.machine)
        self.replicas = Replicas(self.scheduler.models)
        self._memory_limit = memory_limit

    async def open(self) -> None:
        self._launcher.open()
        await self.machine.look()
        await asyncio.to_thread(self._tidy_up)

    async def close(self) -> None:
        """No runner is left."""
        await self.scheduler.close()
        await self._launcher.close()
        await asyncio.to_thread(self.store.close)

    @asynccontextmanager
    async def place(self, model: Model) -> AsyncGenerator[Replica, None]:
        """The model is loaded when the block begins, and stays until it ends.

        Errors: NotFound when its files are not here; what loading raises.
        """
        path, requirements = await asyncio.to_thread(located, self.store.blobs, model)
        self.replicas.expect(path, model)
        acquired = self.scheduler.acquire(
            _Weights(path), self._here(requirements), model.keep_alive, leaves_pinned=model.leaves_pinned
        )
        async with acquired as loaded, self.replicas.of(loaded, model).used() as replica:
            yield replica

    @asynccontextmanager
    async def join(self, model: Model) -> AsyncGenerator[Replica | None, None]:
        """For one who has a place elsewhere: the model if it is loaded as that one wants it, without waiting; else None.

        Errors: NotFound when its files are not here.
        """
        path, requirements = await asyncio.to_thread(located, self.store.blobs, model)
        joined = self.scheduler.join(path, self._here(requirements), model.keep_alive, leaves_pinned=model.leaves_pinned)
        with joined as loaded:
            if loaded is None:
                yield None
                return
            async with self.replicas.of(loaded, model).used() as replica:
                yield replica

    def unload(self, key: str) -> None:
        for path in self.replicas.paths_of(key):
            self.scheduler.unload(path)

    def memory(self) -> Memory:
        """What models may take: of GPUs where there are any, else of the host."""
        gpus = self.machine.gpus or []
        found = self.machine.memory()
        free, total = (sum(gpu.free for gpu in gpus), sum(gpu.total for gpu in gpus)) if gpus else (found.free, found.total)
        if self._memory_limit and not gpus:
            taken = sum(model.memory.total for model in self.scheduler.models.running() if model.memory)
            free, total = min(free, max(0, self._memory_limit - taken)), min(total, self._memory_limit)
        return Memory(free, total)

    def loaded(self) -> list[Loaded]:
        return list(self.scheduler.models.values())

    def _here(self, requirements: LoadRequirements) -> LoadRequirements:
        """What was a share of the head's memory is one of this machine's, and its folder of models is this one's."""
        given = self.settings.host_cache
        n_bytes = host.memory().total // HOST_CACHE_SHARE if given is None else given
        here = {"host_cache_bytes": n_bytes, "models": str(self.store.root)}
        return replace(requirements, options=msgspec.structs.replace(requirements.options, **here))

    def _tidy_up(self) -> None:
        packed_files.tidy(self.store.root, self.settings.packed_cache)
        try:
            self.store.prune()
        except OSError as error:
            log.warning("%s could not be tidied up: %s", self.store.root, error)
