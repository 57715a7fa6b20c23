"""The model that a runner is told to serve which was started before anybody knew for which."""

from __future__ import annotations

import threading
from pathlib import Path

from puna.errors import LoadError


class NamedModel:
    """The model that somebody will name; whatever is said after the first word on it is ignored."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._problem = ""
        self._is_known = threading.Event()

    def set(self, path: Path) -> None:
        if not self._is_known.is_set():
            self._path = path
            self._is_known.set()

    def fail(self, problem: str) -> None:
        if not self._is_known.is_set():
            self._problem = problem
            self._is_known.set()

    def wait(self) -> Path:
        """Errors: LoadError when no model was named but something else was said."""
        self._is_known.wait()
        if self._path is None:
            raise LoadError(self._problem)
        return self._path
