"""Starting a process so that whoever no longer wants it leaves none behind."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from asyncio.subprocess import Process
from subprocess import Popen
from typing import Any


async def start(*command: str, **options: Any) -> Process:
    """As ``asyncio.create_subprocess_exec``, which, cancelled between the start and its answer, forgets what it started.

    Errors: OSError.
    """
    starting = asyncio.ensure_future(asyncio.create_subprocess_exec(*command, **options))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        with contextlib.suppress(OSError):
            await end(await starting)
        raise


async def end(process: Process) -> None:
    """At once, and what it was is collected."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


class Attached:
    """A process that this one had started before there was an event loop, with as much of asyncio's face as runners need."""

    def __init__(
        self, process: Popen[bytes], stdout: asyncio.StreamReader, pipe: asyncio.BaseTransport, ended: asyncio.Future[int]
    ) -> None:
        self.pid = process.pid
        self.stdout: asyncio.StreamReader | None = stdout
        self._process = process
        self._pipe = pipe
        self._ended = ended

    @property
    def returncode(self) -> int | None:
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """Read nothing more; others may hold the pipe open."""
        self._pipe.close()


class _Output(asyncio.StreamReaderProtocol):
    def eof_received(self) -> bool:
        super().eof_received()
        return False  # nothing is ever written: the pipe may go


async def attach(process: Popen[bytes], limit: int) -> Attached:
    """In the running event loop. *limit*: bytes in a line of its output."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit)
    assert process.stdout is not None
    pipe, _ = await loop.connect_read_pipe(lambda: _Output(reader), process.stdout)
    ended: asyncio.Future[int] = loop.create_future()

    def watch() -> None:
        code = process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants to know
            loop.call_soon_threadsafe(ended.set_result, code)

    threading.Thread(target=watch, name=f"end of process {process.pid}", daemon=True).start()
    return Attached(process, reader, pipe, ended)
