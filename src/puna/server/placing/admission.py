"""Gives a load its memory: one load at a time measures, finds a layout and allocates, while others make room if need be.

Which model makes room is the scheduler's decision; what is free and how layers are placed is ``puna.llm``'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from puna import wire
from puna.errors import OutOfMemory, RunnerDied, WorkerLost
from puna.llm.budget import Held, available
from puna.llm.discovery import Machine
from puna.llm.fitting import Free, NoRoomOnGPUs, negotiate
from puna.llm.layout import Policy
from puna.llm.load import LoadRequirements
from puna.llm.quarantine import QUARANTINE_S, CrashedOnGPUs, Quarantine, has_crashed_by_itself
from puna.llm.runner import Runner
from puna.settings import Settings

log = logging.getLogger(__name__)

# A driver may show memory as free only some time after the process that held it is gone.
_RECOVERY_S, _RECOVERY_POLL_S, _RECOVERED_SHARE = 5.0, 0.25, 0.75


@dataclass(frozen=True)
class Others:
    """The other models, as one load sees them."""

    held: Callable[[], list[Held]]
    # Whether one of them may leave for this load, now or later; True: one that has memory of GPUs.
    may_go: Callable[[bool], bool]
    make_room: Callable[[bool], Awaitable[None]]  # returns when one of them has gone, or none may go any more


@dataclass(eq=False)
class Admission:
    settings: Settings
    machine: Machine
    quarantine: Quarantine = field(default_factory=Quarantine)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def load(
        self, runner: Runner, requirements: LoadRequirements, others: Others, without: Collection[str] = ()
    ) -> wire.LoadReply:
        """Returns when memory is taken; the weights are still being read.

        GPUs of the libraries *without* are not used.

        Errors: OutOfMemory with the numbers when it does not fit and nobody can make room; CrashedOnGPUs; what the runner
        reports.
        """
        async with self._lock:
            while True:
                is_fresh = await self.machine.refresh()
                gpus = [gpu for gpu in self.machine.gpus or [] if gpu.library not in without]
                gpu_bytes = sum(gpu.total for gpu in gpus if gpu.kind != "rpc")
                free = available(gpus, self.machine.memory(), others.held(), is_fresh=is_fresh)
                policy = Policy(
                    requirements.num_gpu,
                    self._main_gpu(requirements, gpus),
                    spread=self.settings.sched_spread,
                    overhead=self.settings.gpu_overhead,
                    must_be_full=others.may_go(True),
                    without_swap=others.may_go(False),
                )
                try:
                    return await self._in_the_largest_context(runner, requirements, free, policy, gpu_bytes)
                except OutOfMemory as error:
                    lacks_gpus = isinstance(error, NoRoomOnGPUs)
                    if not (policy.must_be_full if lacks_gpus else policy.without_swap):
                        raise type(error)("; ".join([str(error), *self.machine.lost])) from error
                    log.info("%s; other models make room", error)
                except RunnerDied:
                    if not is_fresh:  # what ended the search may have ended the runner
                        self.machine.forget()
                    raise
                await self._make_room(others, lacks_gpus)

    async def read_weights(self, runner: Runner, reply: wire.LoadReply) -> None:
        """Wait until a model that has its memory can be used.

        Errors: CrashedOnGPUs; what the runner reports.
        """
        used = gpus_of(reply)
        async with self._blaming(runner, used):
            await runner.wait_until_ready(self.settings.load_timeout)
        self.quarantine.lift(self._libraries(used))

    async def suspect(self, model_path: Path, runner: Runner, reply: wire.LoadReply) -> None:
        """Judge a runner that has ended: were its GPUs why it never answered anything?"""
        used = gpus_of(reply)
        if used and not runner.has_served and not runner.has_lost_worker and await has_crashed_by_itself(runner):
            libraries = self._libraries(used)
            if not libraries:
                return
            self.quarantine.add(libraries, model_path)
            log.warning(
                "the runner of %s has crashed on %s before it had answered anything: for %g minutes it is loaded without GPUs "
                "of %s unless num_gpu asks for them",
                *(model_path.name, ", ".join(used), QUARANTINE_S / 60, ", ".join(sorted(libraries))),
            )

    def _main_gpu(self, requirements: LoadRequirements, usable: list[wire.Device]) -> int | None:
        """Its index among those that may be used; requests number all."""
        gpus = self.machine.gpus or []
        if requirements.main_gpu is None or not gpus:
            return None
        if not 0 <= requirements.main_gpu < len(gpus):
            log.warning("main_gpu %d is none of the %d GPUs, it is ignored", requirements.main_gpu, len(gpus))
            return None
        main = gpus[requirements.main_gpu].name
        return next((index for index, gpu in enumerate(usable) if gpu.name == main), None)

    def _libraries(self, devices: Collection[str]) -> set[str]:
        """Whose drivers may be to blame: a worker on another machine that is lost is none of them."""
        return {gpu.library for gpu in self.machine.gpus or [] if gpu.name in devices and gpu.kind != "rpc"}

    @asynccontextmanager
    async def _blaming(self, runner: Runner, devices: Collection[str]) -> AsyncGenerator[None, None]:
        """The end of a runner that has layers on GPUs is told as theirs."""
        try:
            yield
        except WorkerLost:
            raise  # the next search finds it gone
        except RunnerDied as error:
            if devices and await has_crashed_by_itself(runner):
                raise CrashedOnGPUs(str(error), devices, self._libraries(devices)) from error
            raise

    async def _in_the_largest_context(
        self, runner: Runner, requirements: LoadRequirements, free: Free, policy: Policy, gpu_bytes: int
    ) -> wire.LoadReply:
        """A context that nobody asked for takes no layer's place on a GPU, and no other model's."""
        *larger, least = requirements.contexts(gpu_bytes)
        for n_ctx in larger:
            options = msgspec.structs.replace(requirements.options, n_ctx=n_ctx)
            try:
                return await self._in_the_largest_pool(
                    runner, options, free, replace(policy, must_be_full=True, without_swap=True)
                )
            except OutOfMemory as error:
                log.info("a context of %d tokens is too large for what is free: %s", n_ctx, error)
        return await self._in_the_largest_pool(runner, msgspec.structs.replace(requirements.options, n_ctx=least), free, policy)

    async def _in_the_largest_pool(self, runner: Runner, options: wire.LoadOptions, free: Free, policy: Policy) -> wire.LoadReply:
        """With a context for each request that is computed at once; where nobody asked for that, they may share fewer."""
        is_free_to_choose = self.settings.num_parallel == 0 and options.n_pool == 0
        for n_contexts in _halves(options.n_parallel) if is_free_to_choose else ():
            shares = n_contexts < options.n_parallel
            pooled = msgspec.structs.replace(options, n_pool=options.n_ctx * n_contexts if shares else 0)
            try:
                reply = await self._fit_and_commit(runner, pooled, free, policy)
            except OutOfMemory as error:
                log.debug("with %d contexts: %s", n_contexts, error)
                continue
            if shares:
                log.info("%d requests share a cache of %d contexts: more did not fit", options.n_parallel, n_contexts)
            return reply
        is_shared = is_free_to_choose and options.n_parallel > 1
        smallest = msgspec.structs.replace(options, n_pool=options.n_ctx) if is_shared else options
        return await self._fit_and_commit(runner, smallest, free, policy)

    async def _fit_and_commit(self, runner: Runner, options: wire.LoadOptions, free: Free, policy: Policy) -> wire.LoadReply:
        steps = negotiate(free, policy)
        attempt = next(steps)
        while True:
            placed = msgspec.structs.replace(
                options, gpu_layers=list(attempt.layout.parts), projector_device=attempt.layout.projector
            )
            request = wire.LoadRequest(operation=attempt.operation, options=placed)
            devices = [part.device for part in attempt.layout.parts]
            async with self._blaming(runner, [*devices, *filter(None, [attempt.layout.projector])]):
                reply = await runner.try_load(request, self.settings.load_timeout)
            try:
                attempt = steps.send(reply)
            except StopIteration as stop:
                committed: wire.LoadReply = stop.value
                return committed

    async def _make_room(self, others: Others, on_gpus: bool) -> None:
        """Returns when the memory of the model that left can be seen, or after a while all the same."""
        held = sum(model.memory.on_gpus for model in others.held())
        before = sum(gpu.free for gpu in self.machine.gpus or [])
        await others.make_room(on_gpus)
        freed = held - sum(model.memory.on_gpus for model in others.held())
        clock = asyncio.get_running_loop().time
        deadline = clock() + _RECOVERY_S
        while freed > 0 and clock() < deadline:
            if not await self.machine.refresh():
                return
            if sum(gpu.free for gpu in self.machine.gpus or []) - before >= _RECOVERED_SHARE * freed:
                return
            await asyncio.sleep(_RECOVERY_POLL_S)


def gpus_of(reply: wire.LoadReply) -> list[str]:
    """On which a loaded model has something."""
    devices = reply.memory.devices if reply.memory else []
    return [device.device for device in devices if device.is_gpu and device.total > 0]


def _halves(n: int) -> list[int]:
    """n, half of it, and so on down to 2; the last attempt, with 1, is the one whose failure is told."""
    return [n >> i for i in range(n.bit_length() - 1)]
