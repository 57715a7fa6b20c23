"""Route the libraries' own messages into Python's logging, under the logger ``ggml``, and to whoever listens."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from puna.native.ggml import ggml
from puna.native.llama import llama

log = logging.getLogger("ggml")

# enum ggml_log_level; 5 continues the line before.
_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.INFO, 4: logging.WARNING}
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int32, ctypes.c_char_p, ctypes.c_void_p)


@dataclass(frozen=True)
class Line:
    level: int  # of Python's logging
    text: str

    @property
    def is_complaint(self) -> bool:
        """The library calls it a warning or an error."""
        return self.level >= logging.INFO


class _Lines:
    """Messages arrive in pieces, of several threads at once; one line of one thread becomes one record."""

    def __init__(self) -> None:
        self.listeners: dict[int, tuple[list[Line], ...]] = {}
        self._begun: dict[int, Line] = {}

    def add(self, level: int, text: bytes | None, _data: int | None) -> None:
        # By number: a thread that the libraries began has no local values of Python's between two calls.
        thread = threading.get_ident()
        begun = self._begun.pop(thread, Line(logging.DEBUG, ""))
        level = _LEVELS.get(level, begun.level)
        *lines, rest = (begun.text + (text or b"").decode("utf-8", "replace")).split("\n")
        self._begun[thread] = Line(level, rest)
        for line in lines:
            if line.strip(" ."):
                log.log(level, "%s", line)
                for listener in self.listeners.get(thread, ()):
                    listener.append(Line(level, line))


_lines = _Lines()
_callback = _CALLBACK(_lines.add)


def route_to_logging() -> None:
    """What the library calls an error is a warning here: the caller who got the failure reports the error itself."""
    hear(ggml().ggml_log_set)
    hear(llama().llama_log_set)


def hear(log_set: Callable[[ctypes.c_void_p, None], None]) -> None:
    """Also what another library says, through its function that takes whom to tell."""
    log_set(ctypes.cast(_callback, ctypes.c_void_p), None)


@contextmanager
def captured() -> Iterator[list[Line]]:
    """What the libraries say to this thread meanwhile; they tell the reason of a failure nowhere else."""
    route_to_logging()
    heard: list[Line] = []
    thread = threading.get_ident()
    before = _lines.listeners.get(thread, ())
    _lines.listeners[thread] = (*before, heard)
    try:
        yield heard
    finally:
        if before:
            _lines.listeners[thread] = before
        else:
            del _lines.listeners[thread]
