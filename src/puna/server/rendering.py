"""Prompts, rendered where a template can do no harm: a few processes, started when first needed, that may be killed.

What Puna itself wrote is rendered here. One process's request is one message there and one back.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import msgspec

from puna.errors import BadRequest, Overloaded, TemplateError
from puna.llm import process
from puna.prompt.exchange import LENGTH, LIMIT_S, PromptRequest, Rendered, Reply, Source
from puna.prompt.limits import check_template_length

log = logging.getLogger(__name__)

MAX_PROCESSES = min(4, max(2, os.cpu_count() or 1))
PATIENCE = 6  # so many times the processor's time that a prompt may take, on a machine that is busy with other things
START_S = 60.0
IDLE_S = 60.0  # processes that were idle for so long go, but for one
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "VIRTUAL_ENV")

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Reply)

StartProcess = Callable[[], Awaitable[Process]]


async def start_process() -> Process:
    environ = {name: value for name in (*_ENVIRONMENT, "PYTHONPATH") if (value := os.environ.get(name))}
    command = (sys.executable, "-m", "puna", "render")
    return await process.start(*command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=environ)


def _render_own(request: PromptRequest) -> Rendered:
    from puna.prompt.render import render  # with its engines of templates: most models' prompts are rendered elsewhere

    return render(request)


class _Worker:
    def __init__(self, started: Process) -> None:
        self.process = started
        self.idle_since = time.monotonic()

    async def exchange(self, content: bytes) -> bytes:
        """Errors: EOFError or OSError when the process has ended."""
        assert self.process.stdin is not None
        self.process.stdin.write(LENGTH.pack(len(content)) + content)
        await self.process.stdin.drain()
        return await self.message()

    async def message(self) -> bytes:
        """Errors: as exchange."""
        assert self.process.stdout is not None
        (length,) = LENGTH.unpack(await self.process.stdout.readexactly(LENGTH.size))
        return await self.process.stdout.readexactly(length)

    async def end(self) -> None:
        await process.end(self.process)


class Renderers:
    """Belongs to one event loop."""

    def __init__(self, *, start: StartProcess = start_process, limit_s: float = PATIENCE * LIMIT_S) -> None:
        self._start = start
        self._limit_s = limit_s
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._places = asyncio.Semaphore(MAX_PROCESSES)
        self._n_using: Counter[Source] = Counter()  # so many renderings of one template are under way or wait
        self._turns: dict[Source, asyncio.Semaphore] = {}
        self._running: set[asyncio.Task[Rendered]] = set()
        self._warming: asyncio.Task[None] | None = None
        self.n_exchanges = 0

    def warm(self) -> None:
        """A template that is not Puna's own will be rendered soon: have a process started meanwhile."""
        if not self._all and self._warming is None:
            self._warming = asyncio.create_task(self._warm(), name="start of a process for templates")

    async def _warm(self) -> None:
        try:
            self._idle.append(await self._new_worker())
        except Overloaded as error:
            log.warning("%s", error)  # who renders tries again
        finally:
            self._warming = None

    async def render(self, request: PromptRequest) -> Rendered:
        """Errors: TemplateError when the template is malformed, fails, or takes too long; BadRequest; Overloaded."""
        if request.source.is_own:
            return await asyncio.to_thread(_render_own, request)
        task = asyncio.create_task(self._render(request))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        # Who no longer waits leaves a process behind that is in the middle of an exchange: let it end.
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Nothing is being rendered or started any more, and no process is left, when this returns."""
        tasks = (*self._running, *((self._warming,) if self._warming else ()))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(worker.end() for worker in self._all), return_exceptions=True)
        self._all.clear()
        self._idle.clear()

    async def _render(self, request: PromptRequest) -> Rendered:
        for template in (request.source.go_template, request.source.jinja_template):
            check_template_length(template)
        try:
            content = _encoder.encode(request)
        except (ValueError, OverflowError, TypeError) as error:
            raise BadRequest(f"the conversation cannot be rendered: {error}") from error
        async with self._turn(request.source), self._places:
            reply = _decoder.decode(await self._exchange(content))
        if reply.prompt is not None:
            return reply.prompt
        assert reply.failure is not None
        raise (TemplateError if reply.failure.is_template else BadRequest)(reply.failure.text)

    @asynccontextmanager
    async def _turn(self, source: Source) -> AsyncIterator[None]:
        """One template may take all processes but one: another's finds a place though this one is slow."""
        turns = self._turns.setdefault(source, asyncio.Semaphore(MAX_PROCESSES - 1))
        self._n_using[source] += 1
        try:
            async with turns:
                yield
        finally:
            self._n_using[source] -= 1
            if not self._n_using[source]:
                del self._n_using[source], self._turns[source]

    async def _exchange(self, content: bytes) -> bytes:
        if self._warming is not None:
            await asyncio.wait({self._warming})
        worker = self._idle_worker() or await self._new_worker()
        is_well = False
        try:
            self.n_exchanges += 1
            reply = await asyncio.wait_for(worker.exchange(content), self._limit_s)
            is_well = True
        except TimeoutError:
            raise TemplateError(f"the template does too much: it takes longer than {self._limit_s:g} s") from None
        except (EOFError, OSError):
            raise TemplateError(await self._why(worker)) from None
        finally:
            if is_well:
                await self._give_back(worker)
            else:
                self._all.discard(worker)
                await worker.end()
        return reply

    def _idle_worker(self) -> _Worker | None:
        while self._idle:
            worker = self._idle.pop()
            if worker.process.returncode is None:
                return worker
            self._all.discard(worker)  # somebody ended it
        return None

    async def _why(self, worker: _Worker) -> str:
        code = await worker.process.wait()
        log.warning("a process that rendered a template ended with %d", code)
        if code == -signal.SIGPROF:
            return f"the template does too much: it takes more than {LIMIT_S:g} s of a processor's time"
        return "the template does too much: the process that rendered it has crashed"

    async def _new_worker(self) -> _Worker:
        try:
            worker = _Worker(await self._start())
        except OSError as error:
            raise Overloaded(f"no process can be started to render the template: {error.strerror or error}") from error
        self._all.add(worker)
        try:
            await asyncio.wait_for(worker.message(), START_S)
        except (TimeoutError, EOFError, OSError) as error:
            self._all.discard(worker)
            await worker.end()
            raise Overloaded("the process that is to render the template does not start") from error
        return worker

    async def _give_back(self, worker: _Worker) -> None:
        now = time.monotonic()
        worker.idle_since = now
        old = [other for other in self._idle if now - other.idle_since > IDLE_S]
        self._idle = [*(other for other in self._idle if other not in old), worker]
        for other in old:
            self._all.discard(other)
            await other.end()
