"""Ports at which nobody listens, and nobody else can begin to."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_free() -> Iterator[int]:
    """A port of this machine's that is taken: no other test gets it, nor does who connects to it connect to itself.

    A program that is told this port can listen there.
    """
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("127.0.0.1", 0))
        yield int(keeper.getsockname()[1])
