"""Ask workers what they have free, in bounded time.

The library connects without a limit of time, and ends its process where nobody answers or another version does. So every worker
is asked here before the library meets it.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

from puna.errors import WorkerUnreachable
from puna.rpc import protocol
from puna.rpc.protocol import Command, ProtocolError

TIMEOUT_S = 4.0
_MAX_DEVICES = 64


@dataclass(frozen=True)
class WorkerMemory:
    """Bytes of one of a worker's devices."""

    free: int
    total: int


def ask_worker(endpoint: str, timeout_s: float = TIMEOUT_S) -> list[WorkerMemory]:
    """What each of its devices has.

    Errors: WorkerUnreachable, which names it.
    """
    found = ask_workers([endpoint], timeout_s)[endpoint]
    if isinstance(found, WorkerUnreachable):
        raise found
    return found


def ask_workers(endpoints: Iterable[str], timeout_s: float = TIMEOUT_S) -> dict[str, list[WorkerMemory] | WorkerUnreachable]:
    """All at once: the slowest decides how long it takes, and *timeout_s* is the most, whatever hangs."""
    found: dict[str, list[WorkerMemory] | WorkerUnreachable] = {}
    deadline = time.monotonic() + timeout_s

    def look(endpoint: str) -> None:
        try:
            found[endpoint] = _asked(endpoint, timeout_s)
        except WorkerUnreachable as error:
            found[endpoint] = error

    # Names are resolved without a limit of time: a thread that hangs there must not keep the process.
    threads = {endpoint: threading.Thread(target=look, args=(endpoint,), daemon=True) for endpoint in dict.fromkeys(endpoints)}
    for thread in threads.values():
        thread.start()
    for thread in threads.values():
        thread.join(max(0.0, deadline - time.monotonic()))
    silent = WorkerUnreachable
    return {endpoint: found.get(endpoint) or silent(_silence(endpoint, timeout_s)) for endpoint in threads}


def _silence(endpoint: str, timeout_s: float) -> str:
    return (
        f"the RPC worker {endpoint} gave no answer within {timeout_s:g} s: its machine is gone, or it serves another client "
        "(`puna rpc-worker` serves several at once)"
    )


def _asked(endpoint: str, timeout_s: float) -> list[WorkerMemory]:
    host, _, port = endpoint.rpartition(":")
    deadline = time.monotonic() + timeout_s
    try:
        (*_, address), *_ = socket.getaddrinfo(host, int(port), socket.AF_INET, socket.SOCK_STREAM)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.settimeout(timeout_s)
            sock.connect(address)
            return _memory(sock, endpoint, deadline)
    except TimeoutError:
        raise WorkerUnreachable(_silence(endpoint, timeout_s)) from None
    except ProtocolError as error:
        raise WorkerUnreachable(f"{endpoint} is no RPC worker: it answers with {error}") from error
    except OSError as error:
        raise WorkerUnreachable(f"the RPC worker {endpoint} cannot be reached: {error.strerror or error}") from error


def _memory(sock: socket.socket, endpoint: str, deadline: float) -> list[WorkerMemory]:
    def ask(command: Command, payload: bytes = b"") -> bytes:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        return protocol.ask(sock, command, payload)

    version = protocol.greet(sock)
    if not protocol.is_spoken(version):
        theirs, ours = (".".join(map(str, v)) for v in (version, protocol.VERSION))
        raise WorkerUnreachable(
            f"the RPC worker {endpoint} speaks version {theirs} of the protocol, and the library here {ours}: "
            "the same version of Puna is needed on both machines"
        )
    (n_devices,) = protocol.unpacked("I", ask(Command.DEVICE_COUNT))
    if not 0 < n_devices <= _MAX_DEVICES:
        raise ProtocolError(f"{n_devices} devices")
    pairs = [protocol.unpacked("QQ", ask(Command.GET_DEVICE_MEMORY, i.to_bytes(4, "little"))) for i in range(n_devices)]
    return [WorkerMemory(min(free, total), total) for free, total in pairs]
