"""A step that nobody waits for any more is broken off."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from puna.runner.scheduling.task import Task


class Host(Protocol):
    """What computes."""

    def abort(self) -> None: ...
    def clear_abort(self) -> None: ...


class CurrentStep:
    """``tasks`` are those in the step that is computed right now; none between steps."""

    def __init__(self, host: Host) -> None:
        self.tasks: Sequence[Task] = ()
        self._host = host
        self._lock = threading.Lock()
        self._is_last = False

    def begin(self, tasks: Sequence[Task]) -> bool:
        """False where the step is not worth beginning; else it must be ended."""
        with self._lock:
            self.tasks = tasks
            if self._is_unwanted():
                self.tasks = ()
                return False
            return True

    def end(self) -> None:
        with self._lock:
            self.tasks = ()
            self._host.clear_abort()

    def _is_unwanted(self) -> bool:
        return self._is_last or all(task.is_cancelled for task in self.tasks)

    def abort_unwanted(self) -> None:
        """A request was cancelled; any thread."""
        with self._lock:
            if self.tasks and self._is_unwanted():
                self._host.abort()

    def abort_last(self) -> None:
        """No step is worth finishing any more, nor the reading of weights before the first; any thread."""
        with self._lock:
            self._is_last = True
            self._host.abort()
