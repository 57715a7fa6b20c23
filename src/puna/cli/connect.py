"""Find the server a command talks to: the one at OLLAMA_HOST or, where that is this machine and nobody listens, a private one."""

from __future__ import annotations

import functools
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from puna import settings as environment
from puna.cli.private_server import PrivateServer
from puna.errors import ServerUnreachable

if TYPE_CHECKING:
    from puna.api.client import Client

_PROBE_TIMEOUT_S = 2.0
_early: list[PrivateServer] = []  # one at most: started, but no command has asked for it yet


@functools.cache
def settings() -> environment.Settings:
    """The environment's settings, read once: a value that cannot be used is reported once."""
    return environment.load()


def is_listening(address: environment.Address) -> bool:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address.host, address.host)
    try:
        with socket.create_connection((host, address.port), timeout=_PROBE_TIMEOUT_S):
            return True
    except OSError:
        return False


def start_early(*, expects_model: bool) -> None:
    """Start the private server, if one will be needed, for the ``connected`` that follows."""
    if _needs_private_server():
        _early.append(PrivateServer(show_log=settings().debug, expects_model=expects_model))


def discard_early() -> None:
    """End a server that was started early and never used."""
    while _early:
        _early.pop().kill()


@contextmanager
def connected(*, private: bool = True) -> Iterator[Client]:
    """A client of a running server.

    With *private* a server is started for this one command when OLLAMA_HOST is on this machine and nobody listens there;
    an address elsewhere is never replaced.
    Errors: ServerUnreachable when there is no server, or with the end of its log when the private one died.
    """
    if private and (_early or _needs_private_server()):
        with _private_client() as client:
            yield client
        return
    from puna.api.client import Client

    with Client(settings().host, _api_key()) as client:
        yield client


def _api_key() -> str:
    """Of the keys that a server started with these settings would accept, the first; a client needs to know only one."""
    entries = list(settings().api_keys)
    path = settings().api_keys_file
    if not entries and path is not None:
        with suppress(OSError, UnicodeDecodeError):  # a file that only the server may read
            entries = environment.keys_in(path)
    return next(iter(entries), "").partition(" ")[0]


@functools.cache
def _needs_private_server() -> bool:
    return settings().host.is_here and not is_listening(settings().host)


@contextmanager
def _private_client() -> Iterator[Client]:
    server = _early.pop() if _early else PrivateServer(show_log=settings().debug)
    try:
        from puna.api.client import Client  # while the server starts

        with Client(server.address, _api_key()) as client:
            yield client
    except BaseException as error:
        note = server.death_note() if isinstance(error, ServerUnreachable) else None
        server.stop()  # it may be at work: pulling, or answering
        if note:
            raise ServerUnreachable(note) from error
        raise
    server.kill()  # nothing is left to do that could be spoilt
