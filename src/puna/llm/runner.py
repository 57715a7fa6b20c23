"""The server's handle on one runner process: start it, load a model into it, ask it, and never leave it behind.

Its standard input is a socket: the only line to it, over which everything is asked for and answered, and at whose end it
ends itself, so that it cannot outlive a server that is killed. Nobody else can reach it. What it prints is logged. What
the messages mean to a client is the server's business, not this module's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Hashable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TypeVar

from puna import environment, wire
from puna.errors import (
    BadRequest,
    FileFormatError,
    LoadError,
    NotFound,
    OutOfMemory,
    Overloaded,
    PunaError,
    RunnerDied,
    UnsupportedModel,
    WorkerLost,
    WorkerUnreachable,
)
from puna.llm.channel import Channel, NonsenseError
from puna.llm.early import Begun
from puna.llm.oom import oom_kills
from puna.llm.process import Attached, attach
from puna.llm.stderr import Tail
from puna.rpc.probe import ask_workers
from puna.rpc.protocol import endpoint_of

log = logging.getLogger(__name__)

M = TypeVar("M")

START_TIMEOUT_S = 60.0
REQUEST_TIMEOUT_S = 120.0  # for answers that need no model step: health, tokenize
CLOSE_GRACE_S = 3.0
_LONGEST_LINE = 1024 * 1024  # of what it prints
_DECODE_ASIDE = 1 << 18  # bytes; to decode longer answers would keep other requests waiting
_POLL_FIRST_S, _POLL_LAST_S = 0.002, 0.1
_POLL_GROWTH = 1.1  # a first answer waits for what is polled too late: by a tenth of the load

_ERRORS_BY_STATUS: dict[int, type[PunaError]] = {
    400: BadRequest,
    404: NotFound,
    422: FileFormatError,
    501: UnsupportedModel,
    503: Overloaded,
    507: OutOfMemory,
}


def command_for(model_path: Path) -> list[str]:
    # -P: a folder named puna where the server happens to run is not this package.
    return [sys.executable, "-P", "-m", "puna", "runner", "--channel", "--model", str(model_path)]


# As the tensor library says it before it ends the process.
_LOST_CONNECTION = "Remote RPC server crashed"


def error_from(failed: wire.Failed) -> PunaError:
    """The exception that stands for a failure a runner reported."""
    return _ERRORS_BY_STATUS.get(failed.status, PunaError)(failed.error)


class Runner:
    """One runner process. Made by ``start``; every method may be used by many tasks at once."""

    has_lost_worker = False  # on another machine, and has ended for that

    def __init__(self, process: asyncio.subprocess.Process | Attached, channel: Channel) -> None:
        self.run: Hashable = object()  # outlives it wherever its counts do, and is equal to no other
        self._process = process
        self._channel = channel
        self._tail = Tail()
        self._closing = False
        self._oom_kills = oom_kills()
        self._was_ended = False  # by close, not by itself or by somebody else
        self._has_served = False
        self._stuck = ""  # why it was given up
        self._workers: list[str] = []  # on other machines, which hold some of its layers
        self._has_model = False
        self._printed = asyncio.create_task(self._read_printed(), name=f"output of runner {process.pid}")

    @classmethod
    async def start(
        cls, command: Sequence[str], *, environ: Mapping[str, str] | None = None, timeout_s: float = START_TIMEOUT_S
    ) -> Runner:
        """Start a process and wait until it says that it is there.

        *environ* is all that it gets; None: what computing needs of ours.

        Errors: LoadError when it cannot be started, ends, says something else, or says nothing in time.
        """
        own_end, end = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=end.fileno(),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={**(environment.for_computing() if environ is None else environ), "GGML_NO_BACKTRACE": "1"},
                limit=_LONGEST_LINE,
                start_new_session=True,  # an interrupt from the terminal is for the server, which then ends its runners
            )
        except BaseException as error:
            own_end.close()
            if isinstance(error, OSError):
                raise LoadError(f"the runner could not be started: {error}") from error
            raise
        finally:
            end.close()
        return await cls._greeted(process, own_end, timeout_s)

    @classmethod
    async def adopt(cls, begun: Begun, timeout_s: float = START_TIMEOUT_S) -> Runner:
        """As start, of a process that has been started already."""
        return await cls._greeted(await attach(begun.process, _LONGEST_LINE), begun.line, timeout_s)

    @classmethod
    async def _greeted(cls, process: asyncio.subprocess.Process | Attached, own_end: socket.socket, timeout_s: float) -> Runner:
        channel = Channel()
        runner = cls(process, channel)
        try:
            await asyncio.get_running_loop().create_connection(lambda: channel, sock=own_end)
            async with asyncio.timeout(timeout_s):
                await channel.greeted()
        except BaseException as error:
            match error:
                case TimeoutError():
                    reason = f"the runner said nothing within {timeout_s:g} s{runner._because()}"
                case NonsenseError():
                    reason = f"the runner does not say that it is there: {error}"
                case OSError():
                    reason = await runner._terminated(error)
                case _:
                    reason = ""
            await runner.close()
            if reason:
                raise LoadError(reason) from error
            raise
        return runner

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None and not self._closing and not self._stuck

    @property
    def has_crashed(self) -> bool:
        """Whether the process has ended although nobody closed it."""
        return self._process.returncode is not None and not self._was_ended

    @property
    def has_served(self) -> bool:
        """Whether it has answered a request to its end."""
        return self._has_served

    async def ending(self) -> str:
        """Wait for the process to end; how it did, and why if it said so."""
        await self._process.wait()
        await asyncio.wait([self._printed], timeout=1.0)
        return f"{self._how_it_ended()}{self._because()}"

    async def wait(self) -> int:
        """Wait for the process to end; its return code is negative when a signal ended it."""
        return await self._process.wait()

    async def name_model(self, model_path: Path) -> None:
        """Tell a spare runner which model it is for.

        Errors: RunnerDied when it has ended.
        """
        try:
            self._channel.send(wire.NameModel(path=str(model_path)))
        except OSError as error:
            raise await self._died(error) from error

    def give_up(self, reason: str) -> None:
        """Kill a process that no longer gets anywhere; its requests end with this reason."""
        log.error("runner %d is killed: %s", self.pid, reason)
        self._stuck = reason
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def load(self, request: wire.LoadRequest, stall_timeout_s: float) -> wire.LoadReply:
        """Load the model and wait until it can be used.

        Errors: OutOfMemory or another LoadError with the runner's reason; LoadError after *stall_timeout_s* without
        progress; RunnerDied when the process ends.
        """
        reply = await self.try_load(request, stall_timeout_s)
        if not reply.success:
            raise OutOfMemory(reply.error or "the model could not be loaded")
        if request.operation == "commit":
            await self.wait_until_ready(stall_timeout_s)
        return reply

    async def try_load(self, request: wire.LoadRequest, stall_timeout_s: float) -> wire.LoadReply:
        """One operation; a commit returns when memory is taken, before the weights are read.

        Errors: as load, but a lack of memory is a reply.
        """
        options = request.options
        placed = [*(part.device for part in options.gpu_layers), options.projector_device]
        self._workers = list(dict.fromkeys(filter(None, map(endpoint_of, placed))))
        try:
            async with asyncio.timeout(None if stall_timeout_s == float("inf") else stall_timeout_s):
                return await self._ask("/load", request, wire.LoadReply)
        except TimeoutError as error:
            raise LoadError(f"timed out waiting for the runner to load the model{self._because()}") from error

    async def health(self, timeout_s: float = REQUEST_TIMEOUT_S) -> wire.Health:
        """Errors: RunnerDied when the runner does not answer."""
        return await self._ask("/health", None, wire.Health, timeout_s=timeout_s)

    async def occupancy(self) -> wire.Occupancy:
        """Errors: RunnerDied when the runner does not answer."""
        return await self._ask("/occupancy", None, wire.Occupancy, timeout_s=REQUEST_TIMEOUT_S)

    async def devices(self, timeout_s: float) -> wire.Discovery:
        """What this machine computes on, as the runner's process sees it; it has opened the drivers then.

        Errors: RunnerDied when the runner does not answer.
        """
        return await self._ask("/devices", None, wire.Discovery, timeout_s=timeout_s)

    async def tokenize(self, content: str, *, add_special: bool = True, markers: Sequence[str] = ()) -> list[int]:
        """Of the text, without what the *markers* in it stand for."""
        request = wire.TokenizeRequest(content=content, add_special=add_special, markers=list(markers))
        return (await self._ask("/tokenize", request, wire.Tokens, timeout_s=REQUEST_TIMEOUT_S)).tokens

    async def image_tokens(self, request: wire.ImagesRequest) -> list[int]:
        """How many tokens each of the images takes in a prompt.

        Errors: BadRequest naming the image that is none; what else the runner reports; RunnerDied.
        """
        return (await self._ask("/images", request, wire.ImagesReply)).n_tokens

    async def detokenize(self, tokens: list[int]) -> str:
        return (await self._ask("/detokenize", wire.Tokens(tokens=tokens), wire.Text, timeout_s=REQUEST_TIMEOUT_S)).content

    async def embed(self, request: wire.EmbeddingRequest) -> wire.EmbeddingReply:
        """Vectors of texts. Cancelling the caller cancels the work.

        Errors: what the runner reports, as the error of its status; RunnerDied when the process ends.
        """
        reply = await self._ask("/embedding", request, wire.EmbeddingReply)
        self._has_served = True
        return reply

    async def complete(self, request: wire.CompletionRequest) -> AsyncGenerator[wire.CompletionReply, None]:
        """Pieces of the answer, then exactly one Done or Failed. Closing the iterator early cancels the request.

        Errors: RunnerDied when the process ends or its line breaks off before the last message.
        """
        try:
            async with aclosing(self._channel.complete(request)) as replies:
                async for reply in replies:
                    if isinstance(reply, wire.Failed) and reply.lacks_model:
                        await self._check_model()
                    self._has_served = self._has_served or isinstance(reply, wire.Done)
                    yield reply
        except OSError as error:
            raise await self._died(error) from error

    async def _check_model(self) -> None:
        """Errors: RunnerDied where there was a model: a runner that has lost it is of no more use than one that has ended."""
        if self._has_model:
            self.give_up("the runner has lost its model")
            raise await self._died(None)

    async def close(self) -> None:
        """End the process and wait for it: by closing its input and a SIGTERM, then by SIGKILL."""
        self._closing = True
        self._channel.close()
        if self._process.returncode is None:
            self._was_ended = not self._stuck
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            try:
                async with asyncio.timeout(CLOSE_GRACE_S):
                    await self._process.wait()
            except TimeoutError:
                log.warning("runner %d did not end within %g s, killing it", self.pid, CLOSE_GRACE_S)
            finally:
                if self._process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        self._process.kill()
            await self._process.wait()
        await self._finish_reading()

    async def _finish_reading(self) -> None:
        """Let the reader see the end of its pipe; a grandchild that holds it open is not waited for."""
        await asyncio.wait([self._printed], timeout=1.0)
        self._printed.cancel()
        await asyncio.gather(self._printed, return_exceptions=True)
        if isinstance(self._process, Attached):
            self._process.close()

    async def wait_until_ready(self, stall_timeout_s: float) -> None:
        """Wait until the weights of a committed model are read.

        Errors: LoadError after *stall_timeout_s* without progress, or with the runner's reason; RunnerDied.
        """
        clock = asyncio.get_running_loop().time
        progress, since, pause_s = -1.0, clock(), _POLL_FIRST_S
        while True:
            health = await self.health()
            if health.status == "ready":
                self._has_model = True
                return
            if health.status == "error":
                raise LoadError(health.error or f"the model could not be loaded{self._because()}")
            if health.progress != progress:
                progress, since = health.progress, clock()
            elif clock() - since > stall_timeout_s:
                raise LoadError(f"timed out waiting for the runner to start - progress {progress:.2f}{self._because()}")
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * _POLL_GROWTH, _POLL_LAST_S)

    async def _ask(self, path: str, message: wire.Message | None, kind: type[M], timeout_s: float | None = None) -> M:
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._channel.call(path, b"{}" if message is None else wire.encode(message))
        except TimeoutError as error:
            raise RunnerDied(f"the runner did not answer {path} within {timeout_s:g} s") from error
        except OSError as error:
            raise await self._died(error) from error
        if isinstance(answer, wire.Failed):
            if answer.lacks_model:
                await self._check_model()
            raise error_from(answer)
        body = bytes(answer.body)
        return wire.decode(kind, body) if len(body) <= _DECODE_ASIDE else await asyncio.to_thread(wire.decode, kind, body)

    async def _terminated(self, cause: Exception) -> str:
        await self._reaped()
        if self._process.returncode is None:
            return f"the runner has hung up: {cause}"
        return f"the runner has terminated ({self._how_it_ended()}){self._because()}"

    async def _reaped(self) -> None:
        """The socket often ends a moment before the process can be reaped."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                await self._process.wait()
                await asyncio.wait([self._printed])

    async def _died(self, cause: Exception | None) -> RunnerDied:
        """Say why the line broke."""
        await self._reaped()
        if self._closing and not self.has_crashed:
            return RunnerDied("the model was unloaded, or the server is shutting down")
        if not self._stuck and self._process.returncode is None:
            return RunnerDied(f"an error was encountered while running the model: {cause}")
        said = self._stuck or f"model runner has unexpectedly stopped ({self._how_it_ended()}){self._because()}"
        if lost := await self._lost_workers():
            self.has_lost_worker = True
            return WorkerLost(f"{lost}; {said}")
        return RunnerDied(said)

    async def _lost_workers(self) -> str:
        """Which of those that held its layers are gone; empty where the runner ended for another reason."""
        answers = await asyncio.to_thread(ask_workers, self._workers) if self._workers else {}
        gone = [str(answer) for answer in answers.values() if isinstance(answer, WorkerUnreachable)]
        if gone:
            return f"the model was lost with some of its layers: {'; '.join(gone)}"
        if self._workers and _LOST_CONNECTION in self._tail.reason:
            return f"the model was lost with some of its layers: the connection to {' or '.join(self._workers)} has ended"
        return ""

    def _how_it_ended(self) -> str:
        code = self._process.returncode
        if code is None or code >= 0:
            return f"exit status {code}"
        if code == -signal.SIGKILL and oom_kills() > self._oom_kills:
            return "signal SIGKILL, the system has run out of memory"
        try:
            return f"signal {signal.Signals(-code).name}"
        except ValueError:
            return f"signal {-code}"

    def _because(self) -> str:
        return f": {self._tail.reason}" if self._tail.reason else ""

    async def _read_printed(self) -> None:
        assert self._process.stdout is not None
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:  # an endless line: the reader dropped it
                continue
            if not line:
                return
            text = line.decode("utf-8", "replace").rstrip()
            self._tail.add(text)
            log.info("[%d] %s", self._process.pid, text)
