"""Requests that wait: put by any thread, taken by the engine's."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Generic, TypeVar

from puna.runner.scheduling.task import W
from puna.runner.service import NotLoaded

R = TypeVar("R")


class Queue(Generic[W]):
    """Closed until the engine takes requests, and from the moment it does not any more: none is left without an end."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[W] = deque()
        self._is_open = False

    def __len__(self) -> int:
        return len(self._waiting)

    def open(self) -> None:
        with self._changed:
            self._is_open = True

    def put(self, request: W) -> None:
        """Errors: NotLoaded while it is closed."""
        with self._changed:
            if not self._is_open:
                raise NotLoaded
            self._waiting.append(request)
            self._changed.notify()

    def wait(self, is_busy: Callable[[], bool]) -> bool:
        """Until there is something to do: False when it is closed, whatever there is."""
        with self._changed:
            while self._is_open and not (self._waiting or is_busy()):
                self._changed.wait()
            return self._is_open

    def take(self, choose: Callable[[deque[W]], R]) -> R:
        """What is chosen of those that wait, which *choose* removes; it must not block."""
        with self._changed:
            return choose(self._waiting)

    def take_cancelled(self) -> list[W]:
        if not self._waiting:
            return []
        with self._changed:
            found = [request for request in self._waiting if request.is_cancelled]
            for request in found:
                self._waiting.remove(request)
            return found

    def first(self, n: int) -> list[W]:
        """The first so many, which stay."""
        if not self._waiting:
            return []
        with self._changed:
            return list(islice(self._waiting, n))

    def take_all(self) -> list[W]:
        with self._changed:
            found = list(self._waiting)
            self._waiting.clear()
            return found

    def close(self) -> None:
        """Take no more; who waits for something to do learns of it."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()
