"""Which models are loaded: one runner per model file, handed to requests and taken away when nobody needs it.

A model is LOADING, then READY; READY or DRAINING (no new requests; ends when the running ones have), then CLOSING until
its process is gone and its memory with it. Requests wait in one queue. ``_place`` walks it in order after every change
and does what can be done: join a loaded model, start a load, or empty a place for one. A request for a loaded model
never waits behind another model's load. For a load that lacks memory others leave until it fits, or it fails.
Models that a request has pinned (keep_alive -1) never leave for others.
Knows nothing of prompts, of HTTP, of processes, and of how much memory a model needs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from puna.errors import LoadError, Overloaded
from puna.llm.discovery import Machine
from puna.llm.load import LoadRequirements
from puna.server.placing.admission import Admission
from puna.server.placing.lifecycle import Lifecycle
from puna.server.placing.loaded import Loadable, Loaded, State
from puna.server.placing.loading import Launch, Loading, launch_runner
from puna.server.placing.pressure import MemoryPressure
from puna.server.placing.queue import Queue, Waiter
from puna.server.placing.table import LoadedModels, first_to_leave
from puna.settings import FOREVER, Settings

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

log = logging.getLogger(__name__)

AUTO_MAX_LOADED = 3  # per GPU; and where there is none


@dataclass(eq=False)
class Scheduler:
    settings: Settings
    launch: Launch = launch_runner
    machine: Machine = field(default_factory=Machine)
    models: LoadedModels = field(default_factory=LoadedModels)
    queue: Queue = field(default_factory=Queue)
    collectors: tuple[Collector, ...] = ()
    _is_closed: bool = False

    def __post_init__(self) -> None:
        self.admission = Admission(self.settings, self.machine)
        loading = Loading(lambda path: self.launch(path), self.admission)
        self._pressure = MemoryPressure(self.models, self._place)
        self._lifecycle = Lifecycle(self.models, loading, self.settings.stall_timeout, self._place, self._gone)

    def open(self) -> None:
        """Nothing begins before somebody wants a model."""

    @asynccontextmanager
    async def acquire(
        self, model: Loadable, requirements: LoadRequirements, keep_alive: float | None = None, *, leaves_pinned: bool = False
    ) -> AsyncGenerator[Loaded, None]:
        """Use a model: it is loaded when the block begins and stays so until it ends.

        *keep_alive* in seconds replaces the model's; None leaves it, or takes the server's default at the first load. With
        *leaves_pinned* it does not count for a model that is pinned.

        Errors: Overloaded when too many requests wait; what the load raises, to the requests that waited for it.
        """
        if leaves_pinned and self.models.is_pinned(model.model_path):
            keep_alive = None
        loaded = await self._join(model, requirements, keep_alive)
        try:
            assert loaded.task is not None
            await asyncio.wait({loaded.task})
            if loaded.task.cancelled():
                raise LoadError("the model was unloaded before it was ready")
            loaded.task.result()
            yield loaded
        finally:
            self._leave(loaded)

    @contextmanager
    def join(
        self, model_path: Path, requirements: LoadRequirements, keep_alive: float | None = None, *, leaves_pinned: bool = False
    ) -> Iterator[Loaded | None]:
        """Use a model that is loaded and serves those requirements, without waiting, even one that drains; else None.

        For requests that have their place elsewhere: a queue was theirs already.
        """
        loaded = self.models.get(model_path)
        is_here = loaded is not None and loaded.state in (State.READY, State.DRAINING) and loaded.runner.is_alive
        if loaded is None or not is_here or not self._serves(loaded, requirements):
            yield None
            return
        self._use(loaded, None if leaves_pinned and loaded.is_pinned else keep_alive)
        try:
            yield loaded
        finally:
            self._leave(loaded)

    def unload(self, model_path: Path) -> None:
        """Take a model away once its running requests end; new ones load it again. Returns at once."""
        loaded = self.models.get(model_path)
        if loaded is not None:
            loaded.keep_alive = 0
            loaded.is_pinned = False
            loaded.must_unload = loaded.state is not State.LOADING
            self._place()

    async def close(self) -> None:
        """Refuse what waits, end all runners, and return when they are gone."""
        self._is_closed = True
        for waiter in self.queue:
            self.queue.refuse(waiter, Overloaded("the server is shutting down"))
        for loaded in list(self.models.values()):
            self._lifecycle.close(loaded)
        await self._lifecycle.ended()

    async def _join(self, model: Loadable, requirements: LoadRequirements, keep_alive: float | None) -> Loaded:
        if self._is_closed:
            raise Overloaded("the server is shutting down")
        waiter = self.queue.join(model, requirements, keep_alive)
        self._place()
        if len(self.queue) + self.models.n_waiting > max(1, self.settings.max_queue) and waiter.must_wait:
            self._withdraw(waiter)
            raise Overloaded("server busy, please try again.  maximum pending requests exceeded")
        try:
            return await waiter.placed
        except asyncio.CancelledError:
            self._withdraw(waiter)
            raise

    def _withdraw(self, waiter: Waiter) -> None:
        if self.queue.withdraw(waiter):
            self._place()
        elif waiter.placed.done() and not waiter.placed.cancelled() and waiter.placed.exception() is None:
            self._leave(waiter.placed.result())

    def _leave(self, loaded: Loaded) -> None:
        loaded.n_users -= 1
        if loaded.n_users == 0:
            if loaded.state is State.LOADING or loaded.keep_alive <= 0:
                self._lifecycle.close(loaded)  # nobody is left who wants it
            elif loaded.state is not State.CLOSING:
                loaded.start_idling(self._expire)
        self._place()

    def _expire(self, loaded: Loaded) -> None:
        if loaded.state is State.READY and loaded.n_users == 0:
            log.info("unloading %s: not used for %g s", loaded.model.model_path.name, loaded.keep_alive)
            self._lifecycle.close(loaded)
            self._place()

    def _gone(self) -> None:
        self._pressure.eased()
        if not self._is_closed:
            self._place()

    # Placement: all decisions are made here, anew after every change.

    def _place(self) -> None:
        """Serve from the queue whoever can be served, first come first."""
        self.queue.drop_cancelled()
        self._renew_marks()
        if self._pressure.lacks_gpus is not None and not self.models.n_closing:
            self._evict_one(on_gpus=self._pressure.lacks_gpus)  # before anybody in the queue joins the one who has to go
        n_free = self._max_loaded - len(self.models)
        n_closing = self.models.n_closing
        promised: set[Path] = set()  # models that have a place coming to them
        for waiter in self.queue:
            path = waiter.model.model_path
            loaded = self.models.get(path)
            if (loaded is not None and self._try_join(waiter, loaded)) or path in promised:
                continue
            promised.add(path)
            if loaded is not None:
                n_closing -= loaded.state is State.CLOSING
            elif n_free > 0:
                n_free -= 1
                self._start_load(waiter)
            elif n_closing > 0:
                n_closing -= 1
            elif not self._evict_one():
                self._refuse(waiter)
        self._pressure.changed()

    def _renew_marks(self) -> None:
        """Why a model drains may have gone with the request that requirements its place: only an explicit unload stays."""
        for loaded in list(self.models.values()):
            if loaded.state is State.DRAINING:
                loaded.state = State.READY
            if loaded.state is State.READY and loaded.must_unload:
                self._drain(loaded)

    def _try_join(self, waiter: Waiter, loaded: Loaded) -> bool:
        """Join *waiter* to a model that serves it; else make way for loading that model anew."""
        if loaded.state is State.READY and not loaded.runner.is_alive:
            self._lifecycle.close(loaded)
        if loaded.state in (State.LOADING, State.READY) and self._serves(loaded, waiter.requirements):
            self._hand_out(waiter, loaded)
            return True
        if loaded.state is State.READY:
            log.info("loading %s anew: the request needs other options", loaded.model.model_path.name)
            self._drain(loaded)
        return False

    def _serves(self, loaded: Loaded, requirements: LoadRequirements) -> bool:
        is_placed = requirements.is_placed_by(loaded.requirements, len(self.machine.gpus or []))
        return is_placed and requirements.is_served_by(loaded.options)

    def _start_load(self, waiter: Waiter) -> None:
        keep_alive = self.settings.keep_alive if waiter.keep_alive is None else waiter.keep_alive
        loaded = Loaded(waiter.model, waiter.requirements, keep_alive)
        self._lifecycle.start(loaded, self._pressure.others(loaded))
        self._hand_out(waiter, loaded)

    def _hand_out(self, waiter: Waiter, loaded: Loaded) -> None:
        self._use(loaded, waiter.keep_alive)
        self.queue.serve(waiter, loaded)

    def _use(self, loaded: Loaded, keep_alive: float | None) -> None:
        loaded.n_users += 1
        loaded.stop_timer()
        if keep_alive is not None:
            loaded.keep_alive = keep_alive
            loaded.is_pinned = keep_alive == FOREVER

    def _drain(self, loaded: Loaded) -> None:
        loaded.state = State.DRAINING
        if loaded.n_users == 0:
            self._lifecycle.close(loaded)

    def _evict_one(self, *, on_gpus: bool = False) -> bool:
        """Empty a place: the one who leaves first does, now or when it is no longer used.

        False when no model may ever leave for another.
        """
        evictable = self.models.evictable(on_gpus=on_gpus)
        leaving = first_to_leave(evictable)
        if leaving is not None:
            self._drain(leaving)
        return bool(evictable)

    def _refuse(self, waiter: Waiter) -> None:
        names = ", ".join(sorted(loaded.model.model_path.name for loaded in self.models.values()))
        error = Overloaded(
            f"all {len(self.models)} places are taken by models that were asked to stay (keep_alive -1): {names}; "
            "stop one of them or raise OLLAMA_MAX_LOADED_MODELS"
        )
        self.queue.refuse(waiter, error)

    @property
    def _max_loaded(self) -> int:
        return self.settings.max_loaded_models or AUTO_MAX_LOADED * max(1, len(self.machine.gpus or []))
