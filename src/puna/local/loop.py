"""An event loop in a thread of its own, for programs that have none, or whose own is busy running a notebook's cell."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import uvloop

from puna.local.interrupts import Interrupts

T = TypeVar("T")

_END_TIMEOUT_S = 15.0


class LoopThread:
    """Ends with close; a program that forgets that is not kept from ending."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._ending: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="puna", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for the result; an interrupt meanwhile cancels the work.

        Errors: those of the work; RuntimeError once this is closed.
        """
        if not self._thread.is_alive():
            work.close()
            raise RuntimeError("the engine is closed")
        with Interrupts() as interrupts:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            interrupts.when_one_comes(future.cancel)
            try:
                return future.result()
            except BaseException:
                _give_up(future)
                raise

    def iterate(self, items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """The same items for a program without a loop; closing it early closes them."""
        try:
            while True:
                try:
                    yield self.run(anext(items))
                except StopAsyncIteration:
                    return
        finally:
            self._end(items.aclose())

    @property
    def is_own_thread(self) -> bool:
        """Whether garbage is being collected there: who waits for the loop then waits for ever."""
        return threading.current_thread() is self._thread

    def _end(self, work: Coroutine[Any, Any, None]) -> None:
        if not self._thread.is_alive():
            work.close()  # it ended with the loop
        elif self.is_own_thread:
            task = self._loop.create_task(work)
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        else:
            self.run(work)

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_END_TIMEOUT_S)
        if not self._loop.is_running():
            self._loop.close()


def _give_up(future: Future[Any]) -> None:
    if not future.done():
        future.cancel()
        with suppress(BaseException):
            future.result(_END_TIMEOUT_S)
