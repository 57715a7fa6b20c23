"""An event loop in a thread of its own, for programs that have none, or whose own is busy running a notebook's cell."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Coroutine, Generator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import uvloop

from puna.local.interrupts import Interrupts

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

_END_TIMEOUT_S = 15.0
_LOOK_S = 0.25
_CLOSED = "the engine is closed"
_OF_ANOTHER_PROCESS = "an engine belongs to the process that opened it: open one in this process"


class Items(Protocol[T_co]):
    """What comes one by one, and is closed by who stops before its end."""

    async def __anext__(self) -> T_co: ...

    async def aclose(self) -> None: ...


class LoopThread:
    """Ends with close; a program that forgets that is not kept from ending."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._ending: set[asyncio.Task[None]] = set()
        self._items: set[Items[Any]] = set()
        self._thread = threading.Thread(target=self._run, name="puna", daemon=True)
        # Work is begun, or the end is: never the one in the midst of the other. What is collected meanwhile may close this, too.
        self._lock = threading.RLock()
        self._is_closed = False
        self._process = os.getpid()
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        for items in self._items.copy():  # from outside inwards: asyncio's own way closes what they hold beside them
            with suppress(Exception):
                self._loop.run_until_complete(items.aclose())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    @property
    def is_here(self) -> bool:
        """Whether who asks is in the loop's own thread, which cannot wait for its work."""
        return threading.current_thread() is self._thread

    @property
    def is_gone(self) -> bool:
        """Whether the thread runs no more though nobody has closed this: at the interpreter's end, and in a forked process."""
        return sys.is_finalizing() or os.getpid() != self._process

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for the result; an interrupt meanwhile cancels the work.

        Errors: those of the work; RuntimeError once this is closed or gone, also where it is closed meanwhile.
        """
        with Interrupts() as interrupts:
            future = self._begin(work)
            interrupts.when_one_comes(future.cancel)
            try:
                _wait_for(future)
                return future.result()
            except CancelledError:
                if self._is_closed:
                    raise RuntimeError(_CLOSED) from None
                raise
            except BaseException:
                _give_up(future)
                raise

    def _begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self.is_gone:  # asked before the lock, which may have been held when a process was forked
            work.close()
            raise RuntimeError(_CLOSED if sys.is_finalizing() else _OF_ANOTHER_PROCESS)
        with self._lock:
            if self._is_closed:
                work.close()
                raise RuntimeError(_CLOSED)
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def iterate(self, items: Items[T]) -> Generator[T, None, None]:
        """The same items for a program without a loop; closing it early closes them."""

        async def following() -> T:
            return await anext(items)  # asked for in the loop, which knows then what it has to close

        self._items.add(items)
        try:
            while True:
                try:
                    yield self.run(following())
                except StopAsyncIteration:
                    return
        finally:
            self._items.discard(items)
            self._end(items)

    def _end(self, items: Items[Any]) -> None:
        if self._is_closed or self.is_gone:
            return  # they were closed with the loop, or end with the process
        if self.is_here:  # garbage is collected where it happens to be noticed
            task = self._loop.create_task(items.aclose())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        else:
            self.run(items.aclose())

    def close(self) -> None:
        """What is at work is cancelled, and who waits for it is told."""
        if self.is_gone:
            return
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_END_TIMEOUT_S)


def _wait_for(future: Future[Any]) -> None:
    """Python heeds a signal between two of its own operations: one that comes just before a wait, or to another thread, is not
    noticed by a wait that has no end.
    """
    has_ended = threading.Event()
    future.add_done_callback(lambda _: has_ended.set())
    while not has_ended.wait(_LOOK_S):
        pass


def _give_up(future: Future[Any]) -> None:
    if not future.done():
        future.cancel()
        with suppress(BaseException):
            future.result(_END_TIMEOUT_S)
