"""Ctrl-C at moments where Python's own way loses it, or leaves the work behind."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from typing import Any, cast

import pytest
from tests.patience import PATIENCE_S, wait_until

from puna.local.asynchronous import AsyncEngine
from puna.local.engine import _close
from puna.local.loop import LoopThread


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    found = LoopThread()
    yield found
    found.close()


class Work:
    def __init__(self, seconds: float = PATIENCE_S) -> None:
        self.outcome = ""
        self._seconds = seconds

    async def run(self) -> str:
        try:
            await asyncio.sleep(self._seconds)
            self.outcome = "done"
        except asyncio.CancelledError:
            self.outcome = "cancelled"
            raise
        return self.outcome


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_between_the_start_of_the_work_and_the_wait(loop: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    start = asyncio.run_coroutine_threadsafe

    def interrupted(*args: Any) -> Any:
        future = start(*args)
        interrupt()
        return future

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
    work = Work()
    with pytest.raises(KeyboardInterrupt):
        loop.run(work.run())
    wait_until(lambda: work.outcome)
    assert work.outcome == "cancelled"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_where_python_would_print_and_forget_it(loop: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the callback of something that is collected, as of the locks of modules while they are imported."""
    start = asyncio.run_coroutine_threadsafe

    class Garbage:
        pass

    def interrupted(*args: Any) -> Any:
        garbage = Garbage()
        reference = weakref.ref(garbage, lambda _: interrupt())
        del garbage
        assert reference() is None
        return start(*args)

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
    work = Work()
    rescue = threading.Timer(PATIENCE_S / 4, interrupt)  # ends the wait of who has lost the first
    rescue.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run(work.run())
        assert rescue.is_alive()
    finally:
        rescue.cancel()
    wait_until(lambda: work.outcome)
    assert work.outcome == "cancelled"


def test_while_the_wait_is_not_woken(loop: LoopThread) -> None:
    """As when it comes after Python has last looked, or to another thread."""
    work = Work(PATIENCE_S / 4)

    async def interrupted() -> str:
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        return await work.run()

    with pytest.raises(KeyboardInterrupt):
        loop.run(interrupted())
    wait_until(lambda: work.outcome)
    assert work.outcome == "cancelled"


def test_another_thread_and_a_program_with_a_handler_of_its_own_are_left_alone(loop: LoopThread) -> None:
    seen: list[str] = []
    thread = threading.Thread(target=lambda: seen.append(loop.run(Work(0.01).run())))
    thread.start()
    thread.join(PATIENCE_S)

    async def until_interrupted() -> str:
        interrupt()
        while "theirs" not in seen:
            await asyncio.sleep(0.01)
        return "went on"

    before = signal.signal(signal.SIGINT, lambda *_: seen.append("theirs"))
    try:
        assert loop.run(until_interrupted()) == "went on"
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == ["done", "theirs"]


def test_afterwards_all_is_as_before(loop: LoopThread) -> None:
    assert loop.run(Work(0.01).run()) == "done"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def closed_while(loop: LoopThread, work: Work, beside: Callable[[], object]) -> list[str]:
    """What another thread's wait for the work ends with when *beside* has closed the loop."""
    ends: list[str] = []

    def wait() -> None:
        try:
            ends.append(loop.run(work.run()))
        except RuntimeError as error:
            ends.append(str(error))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    beside()
    thread.join(PATIENCE_S / 4)
    assert not thread.is_alive(), "it waits for ever"
    return ends


def test_who_waits_for_work_when_another_thread_closes_is_told(loop: LoopThread) -> None:
    begun = threading.Event()

    class Begun(Work):
        async def run(self) -> str:
            begun.set()
            return await super().run()

    def close() -> None:
        assert begun.wait(PATIENCE_S)
        loop.close()

    work = Begun()
    assert closed_while(loop, work, close) == ["the engine is closed"]
    assert work.outcome == "cancelled"


def test_who_comes_while_another_thread_closes_is_told(loop: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look whether there is a loop and the work's start in it."""
    start = asyncio.run_coroutine_threadsafe
    closers: list[threading.Thread] = []

    def late(*args: Any) -> Any:
        closer = threading.Thread(target=loop.close)
        closers.append(closer)
        closer.start()
        closer.join(0.2)  # by then it has closed, or waits until this has started
        return start(*args)

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", late)
    assert closed_while(loop, Work(), lambda: None) == ["the engine is closed"]
    closers[0].join(PATIENCE_S)


def test_work_that_nobody_waits_for_ends_with_the_loop() -> None:
    loop = LoopThread()
    work = Work()

    async def leave_behind() -> asyncio.Task[str]:
        task = asyncio.create_task(work.run())
        await asyncio.sleep(0)
        return task

    task = loop.run(leave_behind())
    loop.close()
    assert task.cancelled()
    assert work.outcome == "cancelled"
    with pytest.raises(RuntimeError, match="the engine is closed"):
        loop.run(Work().run())


def test_items_that_nobody_reads_to_their_end_are_closed_with_the_loop() -> None:
    loop = LoopThread()
    ends: list[str] = []

    async def items() -> AsyncGenerator[int, None]:
        try:
            yield 1
            yield 2
        finally:
            ends.append("closed")

    given = loop.iterate(items())
    assert next(given) == 1
    loop.close()
    assert ends == ["closed"]
    given.close()  # later, or when Python collects it: there is nothing to say


def test_items_are_closed_from_outside_inwards() -> None:
    """As whoever reads them would; what is left for asyncio to close is closed all at once, and complains."""
    loop = LoopThread()
    complaints: list[str] = []
    loop._loop.set_exception_handler(lambda _, context: complaints.append(context["message"]))

    async def inner() -> AsyncGenerator[int, None]:
        try:
            yield 1
        finally:
            await asyncio.sleep(0)

    async def outer() -> AsyncGenerator[int, None]:
        async with aclosing(inner()) as items:
            async for item in items:
                yield item

    given = loop.iterate(outer())
    assert next(given) == 1
    loop.close()
    assert complaints == []


def test_an_engine_may_be_collected_in_its_own_thread() -> None:
    """Python collects what refers to itself wherever memory is asked for next, and the loop asks for most."""
    loop = LoopThread()
    closed = threading.Event()

    class Engine:
        async def close(self) -> None:
            closed.set()

    async def collect() -> None:
        _close(loop, cast(AsyncEngine, Engine()))

    asyncio.run_coroutine_threadsafe(collect(), loop._loop)
    assert closed.wait(PATIENCE_S / 4)
    loop.close()
    assert not loop._thread.is_alive()
