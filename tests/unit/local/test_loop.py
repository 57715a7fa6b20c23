"""Ctrl-C at moments where Python's own way loses it, or leaves the work behind."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from tests.patience import PATIENCE_S, wait_until

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


def test_another_thread_and_a_program_with_a_handler_of_its_own_are_left_alone(loop: LoopThread) -> None:
    seen: list[str] = []
    thread = threading.Thread(target=lambda: seen.append(loop.run(Work(0.01).run())))
    thread.start()
    thread.join(PATIENCE_S)
    before = signal.signal(signal.SIGINT, lambda *_: seen.append("theirs"))
    try:
        threading.Timer(0.05, interrupt).start()
        assert loop.run(Work(0.5).run()) == "done"
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == ["done", "theirs"]


def test_afterwards_all_is_as_before(loop: LoopThread) -> None:
    assert loop.run(Work(0.01).run()) == "done"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
