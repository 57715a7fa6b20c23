"""What stands in front of the processes that compute: who gets what, what is answered here, and whom nobody listens to."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from puna import host
from puna.errors import LoadError, NativeLibraryError, PunaError, WorkerUnreachable
from puna.rpc import protocol
from puna.rpc import worker as front
from puna.rpc.backend import Backend, OfferedDevice
from puna.rpc.probe import ask_worker
from puna.rpc.protocol import Command
from puna.rpc.worker import Worker
from tests.patience import PATIENCE_S

MIB = 1 << 20
LIMIT = 100 * MIB


class FakeBackend:
    """Keeps what it is sent, and gives addresses in turn."""

    version = (7, 0)

    def __init__(self, n_threads: int = 0) -> None:
        self.devices = [OfferedDevice("a CPU", is_cpu=True)]
        self.pid = 0
        self.is_alive = True
        self.is_closed = False
        self.heard: list[tuple[Command, int]] = []
        self.socket, self._own = socket.socketpair()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        try:
            while True:
                command, n_bytes = protocol.receive_head(self._own)
                payload = protocol.receive(self._own, n_bytes)
                self.heard.append((command, n_bytes))
                if command is Command.ALLOC_BUFFER:
                    answer = struct.pack("<QQ", 4096 * len(self.heard), struct.unpack("<IQ", payload)[1])
                    self._own.sendall(protocol.framed(answer))
                elif command is Command.GET_TENSOR:
                    self._own.sendall(protocol.framed(b"x" * 3_000_000))
                elif command is Command.GET_ALIGNMENT:
                    self._own.sendall(protocol.framed(struct.pack("<Q", 32)))
        except OSError:
            return

    def close(self) -> None:
        self.is_closed = True
        self.die()

    def die(self) -> None:
        for end in (self.socket, self._own):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._thread.join(PATIENCE_S)


class Place:
    def __init__(self, **given: Any) -> None:
        self.backends: list[FakeBackend] = []
        self.worker = Worker("127.0.0.1", 0, start=self._start, **given)  # type: ignore[arg-type]
        self._thread = threading.Thread(target=self.worker.serve)
        self._thread.start()
        self.clients: list[socket.socket] = []

    def _start(self, n_threads: int) -> FakeBackend:
        self.backends.append(FakeBackend(n_threads))
        return self.backends[-1]

    def client(self, *, greets: bool = True) -> socket.socket:
        client = socket.create_connection(("127.0.0.1", self.worker.port), timeout=PATIENCE_S)
        self.clients.append(client)
        if greets:
            assert protocol.greet(client) == (7, 0)
        return client

    def free(self) -> int:
        return ask_worker(f"127.0.0.1:{self.worker.port}", PATIENCE_S)[0].free

    def close(self) -> None:
        self.worker.close()
        self._thread.join(PATIENCE_S)
        for client in self.clients:
            client.close()
        for backend in self.backends:
            backend.die()


@pytest.fixture
def place() -> Iterator[Place]:
    place = Place(limit=LIMIT)
    yield place
    place.close()


def allocate(client: socket.socket, n_bytes: int, device: int = 0) -> int:
    return protocol.unpacked("QQ", protocol.ask(client, Command.ALLOC_BUFFER, struct.pack("<IQ", device, n_bytes)))[0]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_cut_off(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_who_only_looks_takes_no_process(place: Place) -> None:
    (memory,) = ask_worker(f"127.0.0.1:{place.worker.port}", PATIENCE_S)
    assert (memory.free, memory.total) == (LIMIT, LIMIT)
    assert len(place.backends) == 1
    assert place.backends[0].heard == []


def test_no_other_way_than_tcp_is_offered(place: Place) -> None:
    client = place.client(greets=False)
    reply = protocol.ask(client, Command.HELLO, b"\xff" * 24)
    assert reply == bytes((7, 0, 0, 0)) + bytes(24)


def test_clients_share_the_memory_and_have_processes_of_their_own(place: Place) -> None:
    """A third may look while two compute, and what one has taken is free again when it goes."""
    first, second = place.client(), place.client()
    assert allocate(first, 60 * MIB)
    assert place.free() == 40 * MIB
    assert allocate(second, 50 * MIB) == 0  # refused, and the connection goes on
    assert allocate(second, 30 * MIB)
    assert place.free() == 10 * MIB
    until(lambda: len(place.backends) == 3)
    assert sorted(backend.heard[0][0].name if backend.heard else "" for backend in place.backends) == ["", *["ALLOC_BUFFER"] * 2]
    first.close()
    until(lambda: place.free() == 70 * MIB)
    assert sum(backend.is_closed for backend in place.backends) == 1


def test_two_who_ask_at_once_are_not_lent_the_same(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Barrier(2)

    def both_have_looked(sock: socket.socket, command: Command, payload: bytes = b"") -> bytes:
        if command is Command.ALLOC_BUFFER:
            with contextlib.suppress(threading.BrokenBarrierError):
                asked.wait(1.0)
        return ask(sock, command, payload)

    ask = protocol.ask
    clients = [place.client(), place.client()]
    monkeypatch.setattr(protocol, "ask", both_have_looked)
    for client in clients:
        client.sendall(protocol.head(Command.ALLOC_BUFFER, 12) + struct.pack("<IQ", 0, 60 * MIB))
    answers = [protocol.unpacked("QQ", protocol.receive(client, protocol.receive_length(client))) for client in clients]
    assert sorted(n_bytes for _, n_bytes in answers) == [0, 60 * MIB]
    assert place.free() == LIMIT - 60 * MIB


def test_memory_that_is_counted_may_change_meanwhile() -> None:
    account = front.Account()

    class Changing(int):
        """A device that others give buffers on while it is looked at."""

        def __eq__(self, other: object) -> bool:
            account.buffers[len(account.buffers)] = (1, MIB)
            return int(self) == other

        __hash__ = int.__hash__

    account.buffers.update({0: (Changing(0), MIB), 1: (Changing(0), MIB)})
    assert account.on(0) == 2 * MIB


def test_a_buffer_that_is_given_back_is_free(place: Place) -> None:
    client = place.client()
    address = allocate(client, 60 * MIB)
    client.sendall(protocol.head(Command.FREE_BUFFER, 8) + struct.pack("<Q", address))
    assert allocate(client, 90 * MIB)


def test_what_was_taken_and_not_yet_written_is_not_lent_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit it is the machine's memory, where an untouched buffer looks free."""
    monkeypatch.setattr(host, "memory", lambda: host.Memory(1000 * MIB, 500 * MIB, 0))
    place = Place()
    try:
        assert allocate(place.client(), 200 * MIB)
        assert place.free() == 300 * MIB
    finally:
        place.close()


def test_long_messages_pass_in_both_directions(place: Place) -> None:
    client = place.client()
    allocate(client, 20 * MIB)
    client.sendall(protocol.head(Command.SET_TENSOR, 5 * MIB) + bytes(5 * MIB))
    client.sendall(protocol.head(Command.GRAPH_COMPUTE, 3 * MIB) + bytes(3 * MIB))
    client.sendall(protocol.head(Command.GET_TENSOR, 4) + b"what")
    assert protocol.receive_length(client) == 3_000_000
    assert protocol.receive(client, 3_000_000) == b"x" * 3_000_000
    heard = place.backends[0].heard[1:]
    assert heard == [(Command.SET_TENSOR, 5 * MIB), (Command.GRAPH_COMPUTE, 3 * MIB), (Command.GET_TENSOR, 4)]


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(protocol.head(Command.DEVICE_COUNT, 0), id="no greeting"),
        pytest.param(protocol.head(Command.HELLO, 3), id="a greeting of another version"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="another protocol"),
    ],
)
def test_who_does_not_greet_is_cut_off(place: Place, sent: bytes) -> None:
    client = place.client(greets=False)
    client.sendall(sent)
    assert is_cut_off(client)
    assert place.free() == LIMIT


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(protocol.head(Command.HELLO, 24) + bytes(24), id="a second greeting"),
        pytest.param(struct.pack("<BQ", 200, 0), id="no command"),
        pytest.param(protocol.head(Command.SET_TENSOR, 1 << 60), id="more bytes than it has taken"),
        pytest.param(protocol.head(Command.GRAPH_COMPUTE, 1 << 40), id="an endless graph"),
        pytest.param(protocol.head(Command.GET_DEVICE_MEMORY, 1 << 40), id="an endless question"),
        pytest.param(protocol.head(Command.GET_DEVICE_MEMORY, 3) + b"abc", id="a question that is too short"),
        pytest.param(protocol.head(Command.GET_DEVICE_MEMORY, 4) + struct.pack("<I", 9), id="a device that is not there"),
        pytest.param(protocol.head(Command.ALLOC_BUFFER, 12) + struct.pack("<IQ", 9, 1), id="memory of such a device"),
    ],
)
def test_who_says_what_the_protocol_does_not_have_is_cut_off_alone(place: Place, sent: bytes) -> None:
    good, bad = place.client(), place.client()
    assert allocate(good, MIB)
    bad.sendall(sent)
    assert is_cut_off(bad)
    assert allocate(good, MIB)
    until(lambda: place.free() == LIMIT - 2 * MIB)


def test_who_says_nothing_is_not_waited_for(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "GREETING_S", 0.1)
    assert is_cut_off(place.client(greets=False))


def test_too_many_clients_are_turned_away(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "MAX_CLIENTS", 2)
    first, _second = place.client(), place.client()
    assert is_cut_off(place.client(greets=False))
    first.close()

    def is_let_in() -> bool:
        with contextlib.suppress(WorkerUnreachable):
            return place.free() == LIMIT
        return False

    until(is_let_in)


def test_a_process_that_dies_costs_its_own_client_the_connection(place: Place) -> None:
    first, second = place.client(), place.client()
    allocate(first, MIB)
    until(lambda: len(place.backends) == 2)
    allocate(second, MIB)
    place.backends[0].die()
    first.sendall(protocol.head(Command.GET_ALIGNMENT, 4) + bytes(4))
    assert is_cut_off(first)
    assert protocol.ask(second, Command.GET_ALIGNMENT, bytes(4)) == struct.pack("<Q", 32)


def test_a_port_that_is_taken_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        backend = FakeBackend()
        with pytest.raises(PunaError, match=f"^listen tcp 127.0.0.1:{port}: Address already in use"):
            Worker("127.0.0.1", port, start=lambda _: backend)  # type: ignore[arg-type, return-value]
        assert backend.is_closed


@pytest.mark.parametrize(
    ("program", "kind", "said"),
    [
        ("raise SystemExit(3)", LoadError, "could not be started: it ended with status 3"),
        ("""print('{"error": "no RPC devices"}')""", NativeLibraryError, "^no RPC devices$"),
        ("""print('{"devices": []}', flush=True)""", LoadError, "could not be started: .*refused"),
    ],
)
def test_a_process_that_cannot_compute_says_why(program: str, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        Backend(1, [sys.executable, "-S", "-E", "-c", program])


def test_a_library_of_another_protocol_is_refused() -> None:
    program = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', int(sys.argv[1])))\n"
        """print('{"devices": []}', flush=True)\n"""
        "c, _ = s.accept(); c.recv(100); c.sendall((28).to_bytes(8, 'little') + bytes([8, 2]) + bytes(26)); c.recv(1)"
    )
    with pytest.raises(NativeLibraryError, match=r"speaks version 8\.2 of the RPC protocol, which Puna does not know"):
        Backend(1, [sys.executable, "-S", "-E", "-c", program])
