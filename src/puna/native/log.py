"""Route the libraries' own messages into Python's logging, under the logger ``ggml``, and to whoever listens."""

from __future__ import annotations

import ctypes
import logging
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
    """Messages arrive in pieces; one line becomes one record."""

    def __init__(self) -> None:
        self.text = ""
        self.level = logging.DEBUG
        self.listeners: list[list[Line]] = []

    def add(self, level: int, text: bytes | None, _data: int | None) -> None:
        self.level = _LEVELS.get(level, self.level)
        self.text += (text or b"").decode("utf-8", "replace")
        *lines, self.text = self.text.split("\n")
        for line in lines:
            if line.strip(" ."):
                log.log(self.level, "%s", line)
                for listener in self.listeners:
                    listener.append(Line(self.level, line))


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
    """What the libraries say meanwhile, whoever made them say it; they tell the reason of a failure nowhere else."""
    route_to_logging()
    heard: list[Line] = []
    _lines.listeners.append(heard)
    try:
        yield heard
    finally:
        _lines.listeners = [listener for listener in _lines.listeners if listener is not heard]
