"""Work that runs to its end, whatever becomes of the request that caused it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable


class KeptTasks:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, work: Awaitable[None]) -> asyncio.Task[None]:
        async def to_its_end() -> None:
            await work

        task = asyncio.create_task(to_its_end())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def ended(self) -> None:
        """Returns when nothing runs any more, not even what was begun meanwhile."""
        while self._tasks:
            await asyncio.wait(self._tasks)
