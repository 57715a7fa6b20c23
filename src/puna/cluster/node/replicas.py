"""What a node tells of the models that it holds: how busy they are, what of prompts they hold, and how their runners are."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter, deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from puna import wire
from puna.cluster.messages import Ended, Model, ReplicaReport
from puna.cluster.routing.book import PrefixBook
from puna.cluster.routing.keys import keys_of, pack
from puna.errors import NotFound, PunaError
from puna.server.placing.loaded import Loaded, State
from puna.server.placing.table import LoadedModels

_HEALTH_TIMEOUT_S = 1.0
_MAX_ENDED = 256  # that heads may not have been told of yet


@dataclass(eq=False)
class Replica:
    """One runner with its model, as long as it lives."""

    loaded: Loaded
    book: PrefixBook = field(default_factory=PrefixBook)
    n_running: Counter[int] = field(default_factory=Counter)  # requests, by the head's line
    health: wire.Health | None = None
    run: str = field(default_factory=lambda: secrets.token_hex(8))

    @contextmanager
    def running(self, line: int) -> Iterator[None]:
        self.n_running[line] += 1
        try:
            yield
        finally:
            self.n_running[line] -= 1
            self.n_running += Counter()  # without those that are at zero

    def answered(self, request: wire.CompletionRequest, answer: str, done: wire.Done) -> None:
        self.book.record(keys_of(request, answer), done.prompt_eval_count + done.eval_count)

    @asynccontextmanager
    async def used(self) -> AsyncGenerator[Replica, None]:
        """By one request. If the runner goes with it, it is asked before that what it has counted."""
        try:
            yield self
        finally:
            loaded = self.loaded
            if loaded.n_users == 1 and (loaded.keep_alive <= 0 or loaded.state is State.DRAINING):
                await self.look()

    async def look(self) -> None:
        """Ask the runner how it is; one that does not answer soon keeps what it said last."""
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                self.health = await self.loaded.runner.health()
        except (TimeoutError, PunaError):
            return
        if n_cells := self.health.cache_cells:
            self.book.has_room_for(n_cells + self._n_in_host_cache(n_cells))

    def _n_in_host_cache(self, n_cells: int) -> int:
        """Tokens that the host cache has room for, as far as a token takes there what it takes in the cache."""
        memory = self.loaded.reply and self.loaded.reply.memory
        cache_bytes = sum(sum(device.cache) for device in memory.devices) if memory else 0
        return self.loaded.options.host_cache_bytes * n_cells // cache_bytes if cache_bytes else 0


class Replicas:
    """All of a node. A replica is made when a loaded model is first used, and forgotten with it."""

    def __init__(self, models: LoadedModels) -> None:
        self._models = models
        self._all: dict[Path, Replica] = {}
        self._known: dict[Path, Model] = {}  # as heads call them
        self._ended: deque[tuple[int, Ended]] = deque(maxlen=_MAX_ENDED)  # with their numbers
        self.n_ended = 0

    def of(self, loaded: Loaded, model: Model) -> Replica:
        path = loaded.model.model_path
        self._known[path] = model
        if path not in self._all or self._all[path].loaded is not loaded:
            self._forget(path)
            self._all[path] = Replica(loaded)
        return self._all[path]

    def expect(self, path: Path, model: Model) -> None:
        """It is about to be loaded."""
        self._known[path] = model

    def paths_of(self, key: str) -> list[Path]:
        return [path for path, model in self._known.items() if model.key == key]

    async def occupancy(self, key: str) -> wire.Occupancy:
        """Nothing is loaded or kept for that.

        Errors: NotFound; what the runner reports.
        """
        for path in self.paths_of(key):
            loaded = self._models.get(path)
            if loaded is not None and loaded.process is not None:
                return await loaded.process.occupancy()
        raise NotFound(f"{key} is not loaded")

    async def look(self) -> None:
        """Bring up to date what is told of all."""
        for path, replica in list(self._all.items()):
            if self._models.get(path) is not replica.loaded:
                self._forget(path)
        ready = {id(runner) for _, runner in self._models.runners()}
        await asyncio.gather(*(r.look() for r in self._all.values() if r.loaded.process and id(r.loaded.process) in ready))

    def _forget(self, path: Path) -> None:
        replica, model = self._all.pop(path, None), self._known.get(path)
        if replica is not None and model is not None and replica.health is not None:
            self.n_ended += 1
            ended = Ended(run=replica.run, key=model.key, name=model.name, digest=model.digest, health=replica.health)
            self._ended.append((self.n_ended, ended))

    def ended(self, n_told: int) -> list[Ended]:
        """For who was told when there were so many."""
        return [ended for number, ended in self._ended if number > n_told]

    def reports(self, line: int, told: dict[Path, set[int]]) -> list[ReplicaReport]:
        """For the head at the end of that line, which was *told* so many keys of each; that is brought up to date."""
        for path in [path for path in told if path not in self._models]:
            del told[path]
        return [self._report(path, loaded, line, told) for path, loaded in self._models.items() if path in self._known]

    def _report(self, path: Path, loaded: Loaded, line: int, told: dict[Path, set[int]]) -> ReplicaReport:
        replica, model = self._all.get(path), self._known[path]
        running = loaded.running(asyncio.get_running_loop().time())
        changes = (replica.book if replica else PrefixBook()).changes(told.setdefault(path, set()))
        return ReplicaReport(
            key=model.key,
            name=model.name,
            digest=model.digest,
            state=loaded.state.value,
            n_others=replica.n_running.total() - replica.n_running[line] if replica else 0,
            n_parallel=loaded.options.n_parallel,
            n_ctx=loaded.n_ctx,
            seconds_left=running.seconds_left,
            is_pinned=loaded.is_pinned,
            reply=loaded.reply,
            run=replica.run if replica else "",
            health=replica.health if replica else None,
            added=pack(changes.added),
            removed=pack(changes.removed),
        )
