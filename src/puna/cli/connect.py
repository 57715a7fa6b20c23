"""Find the server a command talks to: the one at OLLAMA_HOST or, where that is this machine and nobody listens, a private one."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from puna.api.client import Client
from puna.cli.private_server import PrivateServer
from puna.errors import ServerUnreachable
from puna.settings import Address, Settings

_PROBE_TIMEOUT_S = 2.0


def is_listening(address: Address) -> bool:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address.host, address.host)
    try:
        with socket.create_connection((host, address.port), timeout=_PROBE_TIMEOUT_S):
            return True
    except OSError:
        return False


def _is_this_machine(address: Address) -> bool:
    return address.is_loopback or address.host in ("0.0.0.0", "::")


@contextmanager
def connected(settings: Settings, *, private: bool = True) -> Iterator[Client]:
    """A client of a running server.

    With *private* a server is started for this one command when OLLAMA_HOST is on this machine and nobody listens there;
    an address elsewhere is never replaced.
    Errors: ServerUnreachable when there is no server, or with the end of its log when the private one died.
    """
    if not private or not _is_this_machine(settings.host) or is_listening(settings.host):
        with Client(settings.host) as client:
            yield client
        return
    server = PrivateServer(show_log=settings.debug)  # starts while the client is being imported
    try:
        with Client(server.address) as client:
            yield client
    except ServerUnreachable as error:
        raise ServerUnreachable(server.death_note() or str(error)) from error
    finally:
        server.close()
