"""Which models are loaded: one runner per model file, handed to requests and taken away when nobody needs it.

A model is LOADING, then READY; READY or DRAINING (no new requests; ends when the running ones have), then CLOSING until
its process is gone and its memory with it. Requests wait in one queue. ``_place`` walks it in order after every change
and does what can be done: join a loaded model, start a load, or empty a place for one. A request for a loaded model
never waits behind another model's load. A load that lacks memory is hungry: others leave until it fits, or it fails.
Models that a request has pinned (keep_alive -1) never leave for others.
Knows nothing of prompts, of HTTP, and of how much memory a model needs (puna.server.placing.admission).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from puna import wire
from puna.errors import LoadError, Overloaded, RunnerDied
from puna.host import private_bytes
from puna.llm.budget import Held
from puna.llm.discovery import Machine
from puna.llm.load import WantedLoad
from puna.llm.quarantine import QUARANTINE_S, CrashedOnGPUs
from puna.llm.runner import Runner, command_for
from puna.llm.watchdog import until_stalled
from puna.server.placing.admission import Admission, Others
from puna.server.placing.loaded import Loadable, Loaded, Running, State
from puna.settings import FOREVER, Settings

log = logging.getLogger(__name__)

AUTO_MAX_LOADED = 3  # per GPU; and where there is none


@dataclass(eq=False)
class _Waiter:
    model: Loadable
    wanted: WantedLoad
    keep_alive: float | None
    placed: asyncio.Future[Loaded]


Launch = Callable[[Path], Awaitable[Runner]]


async def launch_runner(model_path: Path) -> Runner:
    return await Runner.start(command_for(model_path))


@dataclass(eq=False)
class Scheduler:
    settings: Settings
    launch: Launch = launch_runner
    machine: Machine = field(default_factory=Machine)
    _loaded: dict[Path, Loaded] = field(default_factory=dict)
    _queue: list[_Waiter] = field(default_factory=list)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _hungry: bool | None = None  # whether a load lacks memory of GPUs, or of the host; None: none lacks any
    _n_gone: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _is_closed: bool = False

    def __post_init__(self) -> None:
        self._admission = Admission(self.settings, self.machine)

    @asynccontextmanager
    async def acquire(
        self, model: Loadable, wanted: WantedLoad, keep_alive: float | None = None, *, leaves_pinned: bool = False
    ) -> AsyncGenerator[Loaded, None]:
        """Use a model: it is loaded when the block begins and stays so until it ends.

        *keep_alive* in seconds replaces the model's; None leaves it, or takes the server's default at the first load. With
        *leaves_pinned* it does not count for a model that is pinned.

        Errors: Overloaded when too many requests wait; what the load raises, to the requests that waited for it.
        """
        if leaves_pinned and self.is_pinned(model.model_path):
            keep_alive = None
        loaded = await self._join(model, wanted, keep_alive)
        try:
            assert loaded.task is not None
            await asyncio.wait({loaded.task})
            if loaded.task.cancelled():
                raise LoadError("the model was unloaded before it was ready")
            loaded.task.result()
            yield loaded
        finally:
            self._leave(loaded)

    def unload(self, model_path: Path) -> None:
        """Take a model away once its running requests end; new ones load it again. Returns at once."""
        loaded = self._loaded.get(model_path)
        if loaded is not None:
            loaded.keep_alive = 0
            loaded.is_pinned = False
            loaded.must_unload = loaded.state is not State.LOADING
            self._place()

    def is_pinned(self, model_path: Path) -> bool:
        """Whether a request has asked that the model stays."""
        loaded = self._loaded.get(model_path)
        return loaded is not None and loaded.is_pinned

    def running(self) -> list[Running]:
        """All models that take memory, the one that stays longest first."""
        now = asyncio.get_running_loop().time()
        found = []
        for loaded in self._loaded.values():
            is_busy = loaded.n_users > 0 or loaded.state is State.LOADING
            left = loaded.keep_alive if is_busy else max(0.0, loaded.idle_until - now)
            is_closing = loaded.state in (State.DRAINING, State.CLOSING)
            memory = loaded.reply.memory if loaded.reply else None
            found.append(Running(loaded.model, memory, loaded.n_ctx, 0.0 if is_closing else left, is_closing))
        return sorted(found, key=lambda item: item.seconds_left, reverse=True)

    def reply_of(self, model_path: Path) -> wire.LoadReply | None:
        """What the model's runner said to its load; None while it is not loaded."""
        loaded = self._loaded.get(model_path)
        return loaded.reply if loaded is not None else None

    def runners(self) -> list[tuple[Loadable, Runner]]:
        """Those that are ready, with their models."""
        ready = (State.READY, State.DRAINING)
        return [(loaded.model, loaded.runner) for loaded in self._loaded.values() if loaded.state in ready]

    async def close(self) -> None:
        """Refuse what waits, end all runners, and return when they are gone."""
        self._is_closed = True
        for waiter in self._queue:
            if not waiter.placed.done():
                waiter.placed.set_exception(Overloaded("the server is shutting down"))
        self._queue.clear()
        for loaded in list(self._loaded.values()):
            self._close(loaded)
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _join(self, model: Loadable, wanted: WantedLoad, keep_alive: float | None) -> Loaded:
        if self._is_closed:
            raise Overloaded("the server is shutting down")
        waiter = _Waiter(model, wanted, keep_alive, asyncio.get_running_loop().create_future())
        self._queue.append(waiter)
        self._place()
        if self._n_waiting > max(1, self.settings.max_queue) and self._must_wait(waiter):
            self._withdraw(waiter)
            raise Overloaded("server busy, please try again.  maximum pending requests exceeded")
        try:
            return await waiter.placed
        except asyncio.CancelledError:
            self._withdraw(waiter)
            raise

    def _must_wait(self, waiter: _Waiter) -> bool:
        return not waiter.placed.done() or waiter.placed.result().n_waiting > 0

    @property
    def _n_waiting(self) -> int:
        return len(self._queue) + sum(loaded.n_waiting for loaded in self._loaded.values())

    def _withdraw(self, waiter: _Waiter) -> None:
        if waiter in self._queue:
            self._queue.remove(waiter)
            self._place()
        elif waiter.placed.done() and not waiter.placed.cancelled() and waiter.placed.exception() is None:
            self._leave(waiter.placed.result())

    def _leave(self, loaded: Loaded) -> None:
        loaded.n_users -= 1
        if loaded.n_users == 0:
            if loaded.state is State.LOADING:
                self._close(loaded)  # nobody is left who wants it
            elif loaded.state is not State.CLOSING:
                self._start_idling(loaded)
        self._place()

    def _start_idling(self, loaded: Loaded) -> None:
        loop = asyncio.get_running_loop()
        self._stop_timer(loaded)
        loaded.idle_until = loop.time() + loaded.keep_alive
        if loaded.keep_alive <= 0:
            self._close(loaded)
        elif loaded.keep_alive < FOREVER:
            loaded.timer = loop.call_later(loaded.keep_alive, self._expire, loaded)

    def _expire(self, loaded: Loaded) -> None:
        if loaded.state is State.READY and loaded.n_users == 0:
            log.info("unloading %s: not used for %g s", loaded.model.model_path.name, loaded.keep_alive)
            self._close(loaded)
            self._place()

    def _stop_timer(self, loaded: Loaded) -> None:
        if loaded.timer is not None:
            loaded.timer.cancel()
            loaded.timer = None

    # Placement: all decisions are made here, anew after every change.

    def _place(self) -> None:
        """Serve from the queue whoever can be served, first come first."""
        self._queue = [waiter for waiter in self._queue if not waiter.placed.done()]  # those whose task was cancelled
        self._renew_marks()
        if self._hungry is not None and not any(loaded.state is State.CLOSING for loaded in self._loaded.values()):
            self._evict_one(on_gpus=self._hungry)  # before anybody in the queue joins the one who has to go
        n_free = self._max_loaded - len(self._loaded)
        n_closing = sum(loaded.state is State.CLOSING for loaded in self._loaded.values())
        promised: set[Path] = set()  # models that have a place coming to them
        for waiter in list(self._queue):
            path = waiter.model.model_path
            loaded = self._loaded.get(path)
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
        self._changed.set()

    def _renew_marks(self) -> None:
        """Why a model drains may have gone with the request that wanted its place: only an explicit unload stays."""
        for loaded in list(self._loaded.values()):
            if loaded.state is State.DRAINING:
                loaded.state = State.READY
            if loaded.state is State.READY and loaded.must_unload:
                self._drain(loaded)

    def _try_join(self, waiter: _Waiter, loaded: Loaded) -> bool:
        """Join *waiter* to a model that serves it; else make way for loading that model anew."""
        if loaded.state is State.READY and not loaded.runner.is_alive:
            self._close(loaded)
        wanted = waiter.wanted
        is_served = wanted.is_served_by(loaded.options) and wanted.is_placed_by(loaded.wanted, len(self.machine.gpus or []))
        if loaded.state in (State.LOADING, State.READY) and is_served:
            self._hand_out(waiter, loaded)
            return True
        if loaded.state is State.READY:
            log.info("loading %s anew: the request needs other options", loaded.model.model_path.name)
            self._drain(loaded)
        return False

    def _hand_out(self, waiter: _Waiter, loaded: Loaded) -> None:
        self._queue.remove(waiter)
        loaded.n_users += 1
        self._stop_timer(loaded)
        if waiter.keep_alive is not None:
            loaded.keep_alive = waiter.keep_alive
            loaded.is_pinned = waiter.keep_alive == FOREVER
        waiter.placed.set_result(loaded)

    def _drain(self, loaded: Loaded) -> None:
        loaded.state = State.DRAINING
        if loaded.n_users == 0:
            self._close(loaded)

    def _evict_one(self, *, on_gpus: bool = False) -> bool:
        """Empty a place: of the idle models the one that expires first, else wait for the busy one kept shortest.

        False when no model may ever leave for another.
        """
        evictable = [m for m in self._loaded.values() if not m.is_pinned and (m.is_on_gpus or not on_gpus)]
        ready = [loaded for loaded in evictable if loaded.state is State.READY]
        idle = [loaded for loaded in ready if loaded.n_users == 0]
        if idle:
            self._drain(min(idle, key=lambda loaded: (loaded.idle_until, str(loaded.model.model_path))))
        elif ready:
            self._drain(min(ready, key=lambda loaded: (loaded.keep_alive, str(loaded.model.model_path))))
        return bool(evictable)

    def _refuse(self, waiter: _Waiter) -> None:
        self._queue.remove(waiter)
        names = ", ".join(sorted(loaded.model.model_path.name for loaded in self._loaded.values()))
        waiter.placed.set_exception(
            Overloaded(
                f"all {len(self._loaded)} places are taken by models that were asked to stay (keep_alive -1): {names}; "
                "stop one of them or raise OLLAMA_MAX_LOADED_MODELS"
            )
        )

    @property
    def _max_loaded(self) -> int:
        return self.settings.max_loaded_models or AUTO_MAX_LOADED * max(1, len(self.machine.gpus or []))

    # Memory: what a load sees of the other models.

    def _others(self, loaded: Loaded) -> Others:
        return Others(
            self._held,
            lambda on_gpus: self._may_go(loaded, on_gpus=on_gpus),
            lambda on_gpus: self._make_room(loaded, on_gpus=on_gpus),
        )

    def _held(self) -> list[Held]:
        return [
            Held(loaded.reply.memory, private_bytes(loaded.process.pid))
            for loaded in self._loaded.values()
            if loaded.process is not None and loaded.reply is not None and loaded.reply.memory is not None
        ]

    def _may_go(self, hungry: Loaded, *, on_gpus: bool) -> bool:
        """Whether another model's memory may become free; one that waits for memory itself has none to give."""
        return any(
            loaded.state is State.CLOSING or (loaded.reply is not None and not loaded.is_pinned)
            for loaded in self._loaded.values()
            if loaded is not hungry and (loaded.is_on_gpus or not on_gpus)
        )

    async def _make_room(self, hungry: Loaded, *, on_gpus: bool) -> None:
        n_gone = self._n_gone
        self._hungry = on_gpus
        try:
            self._place()
            while self._n_gone == n_gone and self._may_go(hungry, on_gpus=on_gpus):
                self._changed.clear()
                await self._changed.wait()
        finally:
            self._hungry = None
            self._place()  # who was to leave and has not may stay

    # Loading and closing: the only places that touch runners.

    def _start_load(self, waiter: _Waiter) -> None:
        keep_alive = self.settings.keep_alive if waiter.keep_alive is None else waiter.keep_alive
        loaded = Loaded(waiter.model, waiter.wanted, keep_alive)
        self._loaded[waiter.model.model_path] = loaded
        loaded.task = asyncio.create_task(self._load(loaded), name=f"load {waiter.model.model_path.name}")
        self._keep(self._watch(loaded))
        self._hand_out(waiter, loaded)

    async def _load(self, loaded: Loaded) -> Runner:
        begin = time.monotonic()
        blamed: set[str] = set()  # libraries of GPUs on which it has crashed
        try:
            while True:
                try:
                    runner = await self._try_load(loaded, blamed)
                    break
                except CrashedOnGPUs as crash:
                    if loaded.wanted.num_gpu is not None or crash.libraries <= blamed:
                        where = ", ".join(crash.devices)
                        raise RunnerDied(f"{crash} (while layers were loaded onto {where}; num_gpu 0 loads none)") from crash
                    blamed |= crash.libraries
                    log.warning(
                        "loading %s on %s has crashed its runner, it is loaded without GPUs of %s: %s",
                        *(loaded.model.model_path.name, ", ".join(crash.devices), ", ".join(sorted(blamed)), crash),
                    )
        except BaseException:
            loaded.state = State.CLOSING
            raise
        loaded.state = State.READY
        if blamed:
            self._admission.quarantine.add(blamed)
            names = ", ".join(sorted(blamed))
            log.warning("GPUs of %s are left alone for %g minutes unless num_gpu asks for them", names, QUARANTINE_S / 60)
        memory = loaded.reply.memory if loaded.reply else None
        size = f"{memory.total / 1e6:.0f} MB, {memory.on_gpus / 1e6:.0f} of them on GPUs" if memory else "of unknown size"
        log.info("loaded %s in %.2f s: %s", loaded.model.model_path.name, time.monotonic() - begin, size)
        return runner

    async def _try_load(self, loaded: Loaded, without: Collection[str]) -> Runner:
        """In a new process; GPUs of the libraries *without* are not used, nor those in quarantine unless they were asked for."""
        runner = await self.launch(loaded.model.model_path)
        if loaded.wanted.num_gpu is None:
            without = self._admission.quarantine.libraries(loaded.model.model_path).union(without)
        try:
            loaded.process = runner
            loaded.reply = await self._admission.load(runner, loaded.wanted, self._others(loaded), without)
            await self._admission.read_weights(runner, loaded.reply)
        except BaseException as error:
            if isinstance(error, CrashedOnGPUs):
                loaded.process = loaded.reply = None
            else:
                loaded.state = State.CLOSING
            await asyncio.shield(self._keep(runner.close()))
            raise
        return runner

    async def _watch(self, loaded: Loaded) -> None:
        """Follow a model from its load to the end of its process, whatever ends it."""
        assert loaded.task is not None
        await asyncio.wait({loaded.task})
        if loaded.task.cancelled() or loaded.task.exception() is not None:
            self._forget(loaded)
            return
        self._place()  # requests may wait to load it with other options
        runner = loaded.runner
        watchdog = asyncio.create_task(until_stalled(runner, self.settings.stall_timeout))
        ended = asyncio.create_task(runner.wait())
        await asyncio.wait({watchdog, ended}, return_when=asyncio.FIRST_COMPLETED)
        if watchdog.done() and (reason := watchdog.result()):
            runner.give_up(reason)
        watchdog.cancel()
        await ended
        if loaded.state is not State.CLOSING:
            log.error("the runner of %s has ended", loaded.model.model_path.name)
            self._close(loaded)

    def _close(self, loaded: Loaded) -> None:
        if loaded.state is State.CLOSING:
            return
        loaded.state = State.CLOSING
        self._stop_timer(loaded)
        self._keep(self._end(loaded))

    async def _end(self, loaded: Loaded) -> None:
        assert loaded.task is not None
        loaded.task.cancel()
        await asyncio.wait({loaded.task})
        if not loaded.task.cancelled() and loaded.task.exception() is None:
            await loaded.runner.close()
            if loaded.reply is not None:
                await self._admission.suspect(loaded.model.model_path, loaded.runner, loaded.reply)
        self._forget(loaded)

    def _forget(self, loaded: Loaded) -> None:
        self._stop_timer(loaded)
        if self._loaded.get(loaded.model.model_path) is loaded:
            del self._loaded[loaded.model.model_path]
            loaded.state = State.CLOSING
            self._n_gone += 1
            self._hungry = None  # what has gone may be enough
            self._changed.set()
            if not self._is_closed:
                self._place()

    def _keep(self, work: Awaitable[None]) -> asyncio.Task[None]:
        """Run *work* to its end, whatever becomes of the request that caused it."""

        async def run() -> None:
            await work

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
