"""``puna rpc-worker``: lends this machine's devices to models on another one, several clients at once.

ggml's own server takes one client after another: whoever asked it for its free memory while it computes would wait until the
model is unloaded. So each client gets a process of its own (puna.rpc.backend), and this one stands in front: it hands the
frames on, answers what concerns all clients, and keeps account of the memory that each has taken. A client that crashes its
process loses its own connection only. There is no authentication in the protocol, nor is anything encrypted.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from puna import host
from puna.errors import PunaError
from puna.keepalive import probe
from puna.rpc import protocol
from puna.rpc.backend import Backend, OfferedDevice
from puna.rpc.protocol import Command, ProtocolError

log = logging.getLogger(__name__)

MAX_CLIENTS = 64
GREETING_S = 10.0  # for a client to say the first word
_GPU_RESERVE = 457 << 20  # of each GPU, for the working memory of its driver
_CHUNK = 1 << 20
_MAX_BYTES = 1 << 16  # of commands with nothing but numbers
_MAX_GRAPH = 1 << 28
_TENSOR_HEAD = 4096  # what describes the tensor, in front of its bytes


@dataclass(eq=False)  # two that hold the same are two
class Account:
    """Bytes that one client has taken of each device."""

    pid: int = 0  # of the process that computes for it
    buffers: dict[int, tuple[int, int]] = field(default_factory=dict)  # by address: device, bytes

    promised: tuple[int, int] = (0, 0)  # device, bytes: of a buffer that is being made

    def on(self, device: int) -> int:
        found = [*self.buffers.values(), self.promised]  # at once: the client's own thread changes them meanwhile
        return sum(n_bytes for index, n_bytes in found if index == device)

    @property
    def total(self) -> int:
        return sum(n_bytes for _, n_bytes in list(self.buffers.values()))

    def untouched(self, device: int) -> int:
        """Bytes of the host's memory that are taken, and look free since nothing was written there yet."""
        return max(0, self.on(device) - host.private_bytes(self.pid)) if self.pid else self.on(device)


class Worker:
    """*limit*: bytes that clients may take of each device altogether; None: all that is free.

    Errors: NativeLibraryError, LoadError where nothing can be computed here; PunaError where the address cannot be listened on.
    """

    def __init__(
        self, address: str, port: int, *, limit: int | None = None, n_threads: int = 0, start: Callable[[int], Backend] = Backend
    ) -> None:
        self._limit = limit
        self._start = partial(start, n_threads)
        self._lock = threading.Lock()
        self._promising = threading.Lock()
        self._accounts: list[Account] = []
        self._clients: set[socket.socket] = set()
        self._closing = False
        self._spare: Backend | None = self._start()
        self._version = self._spare.version
        self.devices: list[OfferedDevice] = self._spare.devices
        try:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            self._listener = socket.create_server((address, port), family=family, backlog=MAX_CLIENTS)
        except OSError as error:
            self._spare.close()
            raise PunaError(f"listen tcp {address}:{port}: {error.strerror}") from error
        self.port = int(self._listener.getsockname()[1])

    def serve(self) -> None:
        """Until it is closed."""
        while not self._closing:
            try:
                client, peer = self._listener.accept()
            except OSError:
                if self._closing:
                    return
                raise
            threading.Thread(target=self._attend, args=(client, f"{peer[0]}:{peer[1]}"), daemon=True).start()

    def close(self) -> None:
        self._closing = True
        # A thread that waits in accept sees the end of the socket only when it is shut down.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            clients, spare, self._spare = list(self._clients), self._spare, None
        for client in clients:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        if spare is not None:
            spare.close()

    def memory(self, device: int) -> tuple[int, int]:
        """Free and total bytes, of what clients may take."""
        with self._lock:
            accounts = list(self._accounts)
        free, total = self._machine_memory(device, accounts)
        if self._limit is not None:
            taken = sum(account.on(device) for account in accounts)
            free, total = min(free, max(0, self._limit - taken)), min(total, self._limit)
        return free, total

    def promise(self, account: Account, device: int, n_bytes: int) -> bool:
        """Put so much of what is free aside for a buffer; False where there is less."""
        with self._promising:
            if n_bytes > self.memory(device)[0]:
                return False
            account.promised = device, n_bytes
            return True

    def _machine_memory(self, device: int, accounts: list[Account]) -> tuple[int, int]:
        if self.devices[device].is_cpu:
            memory = host.memory()
            return max(0, memory.free - sum(account.untouched(device) for account in accounts)), memory.total
        with self._lock:
            spare = self._ready_spare()
            answer = protocol.ask(spare.socket, Command.GET_DEVICE_MEMORY, device.to_bytes(4, "little"))
        free, total = protocol.unpacked("QQ", answer)
        return max(0, free - _GPU_RESERVE), total

    def _ready_spare(self) -> Backend:
        """With the lock held."""
        if self._spare is None or not self._spare.is_alive:
            self._spare = self._start()
        return self._spare

    def _take_spare(self) -> Backend:
        with self._lock:
            taken, self._spare = self._ready_spare(), None
        threading.Thread(target=self._renew_spare, daemon=True).start()
        return taken

    def _renew_spare(self) -> None:
        with self._lock:
            if not self._closing:
                try:
                    self._ready_spare()
                except PunaError as error:
                    log.warning("no process is ready for the next client: %s", error)

    def _attend(self, client: socket.socket, peer: str) -> None:
        account = Account()
        with self._lock:
            is_refused = len(self._clients) >= MAX_CLIENTS
            if not is_refused:
                self._clients.add(client)
                self._accounts.append(account)
        try:
            if is_refused:
                log.warning("%s is turned away: there are %d clients", peer, MAX_CLIENTS)
                return
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            probe(client)  # one whose machine is gone gives its memory back
            _Conversation(self, client, account, peer).hold()
        except ProtocolError as error:
            log.warning("%s is cut off: %s", peer, error)
        except (OSError, PunaError) as error:
            log.info("%s has gone: %s", peer, error)
        finally:
            client.close()
            with self._lock:
                self._clients.discard(client)
                if account in self._accounts:
                    self._accounts.remove(account)

    @property
    def version(self) -> tuple[int, int]:
        return self._version

    @contextmanager
    def backend(self) -> Iterator[Backend]:
        backend = self._take_spare()
        try:
            yield backend
        finally:
            backend.close()


class _Conversation:
    """With one client. It waits for each answer before it says more, so one thread serves both directions."""

    def __init__(self, worker: Worker, client: socket.socket, account: Account, peer: str) -> None:
        self._worker, self._client, self._account, self._peer = worker, client, account, peer
        self._buffer = memoryview(bytearray(_CHUNK))

    def hold(self) -> None:
        self._client.settimeout(GREETING_S)
        command, n_bytes = protocol.receive_head(self._client)
        if command is not Command.HELLO or n_bytes != protocol.CAPABILITY_BYTES:
            raise ProtocolError("the first word is no greeting of this version of the protocol")
        protocol.receive(self._client, n_bytes)
        version = bytes((*self._worker.version, 0, 0))
        self._client.sendall(protocol.framed(version + bytes(protocol.CAPABILITY_BYTES)))
        self._client.settimeout(None)
        try:
            command, n_bytes = self._answer_what_all_may_ask()
        except ConnectionError:
            return  # somebody who only looked
        log.info("%s computes here", self._peer)
        with self._worker.backend() as backend:
            self._account.pid = backend.pid
            while True:
                self._pass_on(backend, command, n_bytes)
                command, n_bytes = self._answer_what_all_may_ask()

    def _answer_what_all_may_ask(self) -> tuple[Command, int]:
        """Up to a command that is for a process that computes."""
        while True:
            command, n_bytes = protocol.receive_head(self._client)
            if command is Command.DEVICE_COUNT:
                protocol.receive(self._client, _few(n_bytes))
                self._answer(len(self._worker.devices).to_bytes(4, "little"))
            elif command is Command.GET_DEVICE_MEMORY:
                (device,) = protocol.unpacked("I", protocol.receive(self._client, _few(n_bytes)))
                self._check_device(device)
                self._answer(b"".join(n.to_bytes(8, "little") for n in self._worker.memory(device)))
            elif command is Command.HELLO:
                raise ProtocolError("a second greeting")
            else:
                return command, n_bytes

    def _pass_on(self, backend: Backend, command: Command, n_bytes: int) -> None:
        if command is Command.ALLOC_BUFFER:
            self._allocate(backend, protocol.receive(self._client, _few(n_bytes)))
            return
        self._check_size(command, n_bytes)
        if n_bytes <= _MAX_BYTES:
            payload = protocol.receive(self._client, n_bytes)
            backend.socket.sendall(protocol.head(command, n_bytes) + payload)
            if command is Command.FREE_BUFFER:
                self._account.buffers.pop(protocol.unpacked("Q", payload)[0], None)
        else:
            backend.socket.sendall(protocol.head(command, n_bytes))
            self._copy(self._client, backend.socket, n_bytes)
        if command in protocol.ANSWERED:
            n_answer = protocol.receive_length(backend.socket)
            if n_answer <= _MAX_BYTES:
                self._answer(protocol.receive(backend.socket, n_answer))
            else:
                self._client.sendall(n_answer.to_bytes(8, "little"))
                self._copy(backend.socket, self._client, n_answer)

    def _check_size(self, command: Command, n_bytes: int) -> None:
        """The process would take memory for what a client only promises to send."""
        most = {
            Command.SET_TENSOR: self._account.total + _TENSOR_HEAD,
            Command.GRAPH_COMPUTE: _MAX_GRAPH,
        }.get(command, _MAX_BYTES)
        if n_bytes > most:
            raise ProtocolError(f"{command.name} with {n_bytes} bytes, where {most} are the most")

    def _check_device(self, device: int) -> None:
        if device >= len(self._worker.devices):
            raise ProtocolError(f"there is no device {device}")

    def _allocate(self, backend: Backend, payload: bytes) -> None:
        device, n_bytes = protocol.unpacked("IQ", payload)
        self._check_device(device)
        if not self._worker.promise(self._account, device, n_bytes):
            log.info("%s asks for %d bytes, which are not free", self._peer, n_bytes)
            self._answer(bytes(16))  # no address and no bytes: there is no memory
            return
        answer = protocol.ask(backend.socket, Command.ALLOC_BUFFER, payload)
        address, n_taken = protocol.unpacked("QQ", answer)
        if address:
            self._account.buffers[address] = (device, n_taken)
        self._account.promised = (0, 0)
        self._answer(answer)

    def _answer(self, answer: bytes) -> None:
        self._client.sendall(protocol.framed(answer))

    def _copy(self, source: socket.socket, target: socket.socket, n_bytes: int) -> None:
        while n_bytes:
            n = source.recv_into(self._buffer[: min(n_bytes, _CHUNK)])
            if not n:
                raise ConnectionError("the connection has ended in the middle of a message")
            target.sendall(self._buffer[:n])
            n_bytes -= n


def _few(n_bytes: int) -> int:
    if n_bytes > _MAX_BYTES:
        raise ProtocolError(f"a command with {n_bytes} bytes")
    return n_bytes
