"""The lines that the parent writes to our standard input, kept until someone takes them.

Imports nothing heavy: lines may come before anything that understands them is there.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class Inbox:
    """Fed by one thread; *follow* may be called by another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = bytearray()
        self._kept: list[bytes] = []
        self._handle: Callable[[bytes], None] | None = None

    def feed(self, data: bytes) -> None:
        """Bytes as they come, in pieces of any size."""
        searched = len(self._rest)
        self._rest += data
        if (end := self._rest.rfind(b"\n", searched)) < 0:
            return
        lines = bytes(self._rest[:end]).split(b"\n")
        del self._rest[: end + 1]
        with self._lock:
            if self._handle is None:
                self._kept += lines
                return
        for line in lines:
            _do(self._handle, line)

    def follow(self, handle: Callable[[bytes], None]) -> None:
        """Have every line handled: those that came before at once, the others on the thread that feeds."""
        with self._lock:  # held meanwhile, so that no later line comes before these
            for line in self._kept:
                _do(handle, line)
            self._kept.clear()
            self._handle = handle


def _do(handle: Callable[[bytes], None], line: bytes) -> None:
    """A line that cannot be dealt with keeps none of the others from that."""
    try:
        handle(line)
    except BaseException:
        log.exception("a line of the parent's cannot be dealt with")
