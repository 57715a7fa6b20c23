"""Starting a process so that whoever no longer wants it leaves none behind."""

from __future__ import annotations

import asyncio
import contextlib
from asyncio.subprocess import Process
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
