"""A connection whose other machine has gone without a word ends nevertheless, within a minute or so.

Without this the system asks after two hours; and what was sent and is not acknowledged it sends again for a quarter of one.
"""

from __future__ import annotations

import math
import socket
from contextlib import suppress
from typing import Protocol

_PROBES = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))


class _Socket(Protocol):
    """Of the system, or as an event loop lends it."""

    @property
    def family(self) -> int: ...
    def setsockopt(self, level: int, name: int, value: int, /) -> None: ...


def probe(sock: _Socket, unacknowledged_s: float = math.inf) -> None:
    """Have the system ask whether the other side is still there. *unacknowledged_s*: and not wait longer than that for it to take
    what was sent, which ends connections that read nothing for so long, too.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with suppress(OSError):  # of one that the other side has closed already: some systems let nothing be set there
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _PROBES:
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        if hasattr(socket, "TCP_USER_TIMEOUT") and unacknowledged_s * 1000 < 1 << 31:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(unacknowledged_s * 1000)))
