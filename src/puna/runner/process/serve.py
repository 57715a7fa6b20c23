"""Serving until a signal comes, and ending in bounded time then: to a parent over its channel, or to a person over HTTP.

Knows nothing of arguments or of how an engine is made.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType

from puna.runner.service import EngineService
from puna.runner.transport.outbox import Outbox

log = logging.getLogger(__name__)

CLOSE_S = 3.0  # for the engine to end its requests and free its memory
DRAIN_S = 1.0  # for the last lines to reach who asked
EXIT_S = 6.0  # after a signal the process is gone, whatever hangs
_POLL_S = 0.01


def on_signal(end: Callable[[], None]) -> None:
    """Have *end* called at the first SIGTERM or SIGINT. EXIT_S later the process is gone."""

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # A native call that never returns must not keep the process, nor the memory it holds.
        timer = threading.Timer(EXIT_S, os._exit, args=(0,))
        timer.daemon = True
        timer.start()
        end()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)


def wait_for_signal() -> None:
    """Return at the first SIGTERM or SIGINT.

    What waits is a read of bytes that the signal itself writes, for those stay until they are read. A lock that the handler
    would release misses a signal that comes in the moment before the wait, or in another thread: Python runs handlers in
    this one only, and between two of its own operations.
    """
    reading, writing = socket.socketpair()
    with reading, writing:
        writing.setblocking(False)
        signals: list[int] = []
        on_signal(lambda: signals.append(1))
        before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        try:
            while not signals:
                reading.recv(1)
        finally:
            signal.set_wakeup_fd(before)


def serve_parent(service: EngineService, outbox: Outbox, take_no_more: Callable[[], None]) -> None:
    """Let the threads that read and compute do so until a signal ends it."""
    wait_for_signal()
    take_no_more()
    close(service)
    deadline = time.monotonic() + DRAIN_S
    while outbox.n_unsent and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def close(service: EngineService) -> None:
    """End what the engine has, within CLOSE_S."""
    thread = threading.Thread(target=_close, args=(service,), name="close", daemon=True)
    thread.start()
    thread.join(CLOSE_S)
    if thread.is_alive():
        log.warning("the engine did not close within %s s", CLOSE_S)


def _close(service: EngineService) -> None:
    try:
        service.close()
    except Exception:
        log.exception("the engine failed to close")
