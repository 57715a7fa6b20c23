"""A result that is made in a thread of its own while its owner does something else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar, cast

T = TypeVar("T")


class Meanwhile(Generic[T]):
    """Begins to *make* at once. A failure is raised to whoever asks for the result."""

    def __init__(self, make: Callable[[], T], name: str) -> None:
        self._make = make
        self._result: T | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._make()
        except BaseException as error:  # noqa: BLE001 - who asks gets it
            self._error = error

    def result(self) -> T:
        """Waits for it. Errors: whatever making it has raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return cast(T, self._result)

    def discard(self, close: Callable[[T], None]) -> None:
        """Wait until it is made, and *close* it if it was."""
        self._thread.join()
        if self._error is None:
            close(cast(T, self._result))
