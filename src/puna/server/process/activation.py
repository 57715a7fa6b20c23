"""Sockets that a service manager opened for this process: systemd's protocol, LISTEN_PID and LISTEN_FDS.

The manager listens before the server runs and starts it with the first connection, which waits meanwhile. What it opened
counts, not OLLAMA_HOST: the settings are brought in line with it, so that a socket other machines reach needs keys as well.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from dataclasses import replace

from puna.errors import PunaError
from puna.settings import Address, Settings

FIRST_FD = 3
_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


def inherited(environ: MutableMapping[str, str] = os.environ) -> list[socket.socket]:
    """The sockets that were opened for this very process; the variables go, so that no child takes them for its own.

    Errors: PunaError when one of them cannot be served on.
    """
    pid, count = environ.get("LISTEN_PID", ""), environ.get("LISTEN_FDS", "")
    for name in _VARIABLES:
        environ.pop(name, None)
    if pid != str(os.getpid()) or not count.isdecimal():
        return []
    return [_socket(fd) for fd in range(FIRST_FD, FIRST_FD + int(count))]


def _socket(fd: int) -> socket.socket:
    try:
        os.set_inheritable(fd, False)  # a runner that holds it would keep the port after the server's end
        listener = socket.socket(fileno=fd)
        listens = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise PunaError(f"LISTEN_FDS: file {fd} is no socket: {error.strerror}") from error
    if not listens or listener.type != socket.SOCK_STREAM or listener.family not in (socket.AF_INET, socket.AF_INET6):
        listener.close()
        raise PunaError(f"LISTEN_FDS: file {fd} is no TCP socket that listens; in the .socket file use ListenStream=HOST:PORT")
    return listener


def as_opened(settings: Settings, listeners: list[socket.socket]) -> Settings:
    """The settings with the address of the sockets: of several, one that other machines reach, if there is any."""
    addresses = [Address(host=host, port=port) for host, port in (listener.getsockname()[:2] for listener in listeners)]
    return replace(settings, host=min(addresses, key=lambda address: address.is_loopback))
