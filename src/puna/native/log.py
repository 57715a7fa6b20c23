"""Route the libraries' own messages into Python's logging, under the logger ``ggml``."""

from __future__ import annotations

import ctypes
import logging

from puna.native.ggml import ggml
from puna.native.llama import llama

log = logging.getLogger("ggml")

# enum ggml_log_level; 5 continues the line before.
_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.INFO, 4: logging.WARNING}
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int32, ctypes.c_char_p, ctypes.c_void_p)


class _Lines:
    """Messages arrive in pieces; one line becomes one record."""

    def __init__(self) -> None:
        self.text = ""
        self.level = logging.DEBUG

    def add(self, level: int, text: bytes | None, _data: int | None) -> None:
        self.level = _LEVELS.get(level, self.level)
        self.text += (text or b"").decode("utf-8", "replace")
        *lines, self.text = self.text.split("\n")
        for line in lines:
            if line.strip(" ."):
                log.log(self.level, "%s", line)


_callback = _CALLBACK(_Lines().add)


def route_to_logging() -> None:
    """What the library calls an error is a warning here: the caller who got the failure reports the error itself."""
    pointer = ctypes.cast(_callback, ctypes.c_void_p)
    ggml().ggml_log_set(pointer, None)
    llama().llama_log_set(pointer, None)
