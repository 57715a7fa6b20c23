"""Who is asked for what a worker has: anything may listen there."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from puna.errors import WorkerUnreachable
from puna.rpc import protocol
from puna.rpc.probe import WorkerMemory, ask_worker, ask_workers
from puna.rpc.protocol import Command
from tests.patience import PATIENCE_S
from tests.ports import kept_free

GIB = 1 << 30
Answer = Callable[[Command, bytes], bytes]


@contextmanager
def listening(answer: Answer | bytes) -> Iterator[str]:
    """Somebody who answers each command so, or who says these bytes and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            client, _ = listener.accept()
            with client:
                try:
                    while True:
                        command, n_bytes = protocol.receive_head(client)
                        payload = protocol.receive(client, n_bytes)
                        if isinstance(answer, bytes):
                            client.sendall(answer)
                            return
                        client.sendall(protocol.framed(answer(command, payload)))
                except OSError:
                    return

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join(PATIENCE_S)


def worker(command: Command, payload: bytes, *, version: tuple[int, int] = protocol.VERSION, n_devices: int = 2) -> bytes:
    if command is Command.HELLO:
        return bytes((*version, 0, 0)) + bytes(24)
    if command is Command.DEVICE_COUNT:
        return struct.pack("<I", n_devices)
    assert command is Command.GET_DEVICE_MEMORY
    (device,) = struct.unpack("<I", payload)
    return struct.pack("<QQ", (device + 1) * GIB, 4 * GIB)


def test_each_device_tells_what_it_has() -> None:
    with listening(worker) as endpoint:
        assert ask_worker(endpoint) == [WorkerMemory(GIB, 4 * GIB), WorkerMemory(2 * GIB, 4 * GIB)]


def test_an_older_minor_version_is_spoken_with_and_others_are_not() -> None:
    assert protocol.is_spoken((7, 0))
    assert not protocol.is_spoken((7, 1))
    assert not protocol.is_spoken((6, 0))
    with listening(lambda command, payload: worker(command, payload, version=(6, 1))) as endpoint:
        said = rf"^the RPC worker {endpoint} speaks version 6\.1 of the protocol, and the library here 7\.0: .*same version"
        with pytest.raises(WorkerUnreachable, match=said):
            ask_worker(endpoint)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is no RPC worker: it answers with an answer of"),
        (b"", "cannot be reached: the other side has closed the connection"),
        (protocol.framed(b"7"), "is no RPC worker: it answers with a greeting of 1 bytes"),
        (lambda command, payload: worker(command, payload, n_devices=0), "it answers with 0 devices"),
        (lambda command, payload: worker(command, payload, n_devices=1 << 31), "it answers with 2147483648 devices"),
        (b"x" * 9, "is no RPC worker: it answers with an answer of"),
    ],
)
def test_who_is_no_worker_is_told(answer: Answer | bytes, said: str) -> None:
    with listening(answer) as endpoint, pytest.raises(WorkerUnreachable, match=said):
        ask_worker(endpoint)


def test_nobody_there_is_told_with_the_address() -> None:
    with kept_free() as port:
        endpoint = f"127.0.0.1:{port}"
        with pytest.raises(WorkerUnreachable, match=f"^the RPC worker {endpoint} cannot be reached: Connection refused$"):
            ask_worker(endpoint)


def test_a_name_that_nobody_has_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(WorkerUnreachable, match="the RPC worker attic:50052 cannot be reached: Name or service not known"):
        ask_worker("attic:50052")


def test_the_silent_keep_nobody_from_being_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """One listens and says nothing, of another the name is never found: both are given up, whatever they do."""
    never = threading.Event()
    resolve = socket.getaddrinfo

    def hang(host: str, *rest: object) -> object:
        if host == "attic":
            never.wait(PATIENCE_S)
        return resolve(host, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    with socket.create_server(("127.0.0.1", 0)) as silent, listening(worker) as endpoint:
        mute = f"127.0.0.1:{silent.getsockname()[1]}"
        found = ask_workers([mute, "attic:50052", endpoint, mute], timeout_s=1.0)
        never.set()
    assert list(found) == [mute, "attic:50052", endpoint]
    assert found[endpoint] == [WorkerMemory(GIB, 4 * GIB), WorkerMemory(2 * GIB, 4 * GIB)]
    for name in (mute, "attic:50052"):
        assert f"the RPC worker {name} gave no answer within 1 s" in str(found[name])


def test_devices_have_the_names_of_their_workers() -> None:
    name = protocol.device_name("box:50052", 1)
    assert name == "RPC1[box:50052]"
    assert protocol.endpoint_of(name) == "box:50052"
    assert protocol.endpoint_of("CUDA0") == protocol.endpoint_of("") == protocol.endpoint_of("RPC1[]") == ""
