"""Many requests of one program: a bounded number at once, the results in order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from puna.local.progress import counting

T = TypeVar("T")
R = TypeVar("R")

# Enough that the runner always has some waiting, whatever it computes at once; more would only take memory here.
AT_ONCE = 256


async def in_order(work: Callable[[T], Awaitable[R]], items: Sequence[T], *, shows: bool, at_once: int = AT_ONCE) -> list[R]:
    """What *work* makes of each item. The first error ends all, with a note that says which item it was.

    Errors: those of *work*.
    """
    results: dict[int, R] = {}
    numbered = iter(enumerate(items))

    async def worker() -> None:
        for number, item in numbered:
            try:
                results[number] = await work(item)
            except Exception as error:
                error.add_note(f"item {number} of {len(items)}")
                raise
            advance()

    with counting(len(items), shows=shows) as advance:
        workers = [asyncio.create_task(worker()) for _ in range(min(at_once, len(items)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for task in workers:
                task.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
    return [results[number] for number in range(len(items))]
