"""Ctrl-C where a program waits for work in another thread: it ends the work, then the wait.

Python raises KeyboardInterrupt between any two operations of the main thread: also between the start of the work and the moment
from which somebody would cancel it, which then goes on unseen; and in callbacks of garbage and of imports, where it is
printed and lost.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self


class Interrupts:
    """A context: within it the first interrupt is noted, and raised at its end. A second one is raised where it comes.

    Elsewhere than in the main thread, and where a program has a handler of its own, interrupts are as they were.
    """

    def __init__(self) -> None:
        self._has_come = False
        self._is_ours = False
        self._end: Callable[[], object] | None = None

    def __enter__(self) -> Self:
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):
            self._is_ours = True
            signal.signal(signal.SIGINT, self._note)
        return self

    def when_one_comes(self, end: Callable[[], object]) -> None:
        """Have *end* called when an interrupt comes; at once, if one has."""
        self._end = end
        if self._has_come:
            end()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._has_come:
            raise KeyboardInterrupt from None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._has_come:
            signal.default_int_handler(number, frame)
        self._has_come = True
        if self._end is not None:
            self._end()
