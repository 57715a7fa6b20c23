"""The server on sockets that a service manager opened before it started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from puna.errors import PunaError
from puna.server.process import activation
from puna.settings import Address, Settings
from tests.patience import PATIENCE_S

# As a manager starts a service: the sockets are files 3, 4, … and the variables name the process itself.
START = 'exec {redirections}; LISTEN_PID=$$ LISTEN_FDS={n} LISTEN_FDNAMES=puna exec "$@"'


def _start(folder: Path, listeners: list[socket.socket], **settings: str) -> subprocess.Popen[str]:
    # First away from the numbers that they shall have in the end.
    moved = [os.dup2(listener.fileno(), 60 + i, inheritable=True) for i, listener in enumerate(listeners)]
    redirections = " ".join(f"{activation.FIRST_FD + i}<&{fd} {fd}<&-" for i, fd in enumerate(moved))
    script = START.format(redirections=redirections, n=len(listeners))
    environ = {**os.environ, "OLLAMA_HOST": "127.0.0.1:1", "OLLAMA_MODELS": str(folder), "PUNA_WARM_SPARE": "0", **settings}
    command = ["bash", "-c", script, "bash", sys.executable, "-m", "puna", "serve"]
    try:
        return subprocess.Popen(command, pass_fds=moved, env=environ, stderr=subprocess.PIPE, text=True)
    finally:
        for fd in moved:
            os.close(fd)


@contextmanager
def serving(folder: Path, listeners: list[socket.socket]) -> Iterator[subprocess.Popen[str]]:
    process = _start(folder, listeners)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE_S)


def _url(listener: socket.socket) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_connection_that_came_before_the_server_is_answered(tmp_path: Path) -> None:
    with ExitStack() as sockets:
        listeners = [sockets.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        early = sockets.enter_context(socket.create_connection(listeners[0].getsockname(), timeout=PATIENCE_S))
        early.sendall(b"GET /api/version HTTP/1.0\r\nHost: localhost\r\n\r\n")
        with serving(tmp_path, listeners):
            assert b'"version"' in b"".join(iter(lambda: early.recv(4096), b""))
            for listener in listeners:
                assert httpx.get(_url(listener) + "/", timeout=PATIENCE_S).text == "Ollama is running"


def test_a_socket_that_other_machines_reach_needs_a_key(tmp_path: Path) -> None:
    """Whatever OLLAMA_HOST says: it is not what is listened on."""
    with socket.create_server(("127.0.0.1", 0)) as safe, socket.create_server(("0.0.0.0", 0)) as reached:
        process = _start(tmp_path, [safe, reached])
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "OLLAMA_HOST=0.0.0.0 would let other machines use this server without a key" in errors


def test_sockets_for_another_process_are_left_alone() -> None:
    environ = {"LISTEN_PID": str(os.getpid() + 1), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "x", "HOME": "/"}
    assert activation.inherited(environ) == []
    assert environ == {"HOME": "/"}


@pytest.mark.parametrize("count", ["", "no", "-1", "0"])
def test_no_sockets(count: str) -> None:
    assert activation.inherited({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": count}) == []


@pytest.mark.parametrize(
    ("family", "kind"), [(socket.AF_UNIX, socket.SOCK_STREAM), (socket.AF_INET, socket.SOCK_DGRAM), (socket.AF_INET, 0)]
)
def test_what_cannot_be_served_on_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: socket.AddressFamily, kind: int
) -> None:
    with socket.socket(family, kind or socket.SOCK_STREAM) as given:
        given.bind(str(tmp_path / "socket") if family == socket.AF_UNIX else ("127.0.0.1", 0))
        if family == socket.AF_UNIX:
            given.listen()
        monkeypatch.setattr(activation, "FIRST_FD", os.dup(given.fileno()))
        with pytest.raises(PunaError, match=r"no TCP socket that listens; .* ListenStream=HOST:PORT"):
            activation.inherited({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"})


def test_a_file_that_is_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        number = closed.fileno()
    monkeypatch.setattr(activation, "FIRST_FD", number)
    with pytest.raises(PunaError, match="is no socket: Bad file descriptor"):
        activation.inherited({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"})


def test_the_most_open_address_counts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as safe, socket.create_server(("0.0.0.0", 0)) as reached:
        settings = activation.as_opened(Settings(), [safe, reached])
        assert settings.host == Address(host="0.0.0.0", port=reached.getsockname()[1])
        assert activation.as_opened(Settings(), [safe]).host.is_loopback
