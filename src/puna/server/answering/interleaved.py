"""Several streams read as one, each part with the number of the stream that it comes from.

Knows nothing of what streams carry.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")

_AHEAD = 2  # parts of each stream that may wait to be read


async def interleaved(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Parts as they come, until all streams have ended. The first error of a stream is raised; then, and when this
    generator is closed, the others are closed too.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for part in only:
                yield 0, part
        return
    waiting: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(_AHEAD * len(streams))

    async def follow(number: int, stream: AsyncGenerator[T, None]) -> None:
        error: Exception | None = None
        try:
            async with aclosing(stream):
                async for part in stream:
                    await waiting.put((number, part))
        except Exception as raised:  # noqa: BLE001 - it is raised where the parts are read
            error = raised
        await waiting.put(error)

    tasks = [asyncio.create_task(follow(number, stream)) for number, stream in enumerate(streams)]
    n_left = len(tasks)
    try:
        while n_left:
            came = await waiting.get()
            if isinstance(came, Exception):
                raise came
            if came is None:
                n_left -= 1
            else:
                yield came
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
