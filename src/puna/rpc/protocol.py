"""The protocol in which ggml computes on another machine (ggml-rpc.h, version 7): commands, their frames, and names of devices.

A command is a byte, the length of what follows in eight bytes, and that; an answer is a length and that. All numbers are in
the order of little-endian machines. The library speaks it by itself while a model is computed. Puna reads and writes it in
three places where the library would wait for ever or end its process: where it looks for workers (puna.rpc.probe), in front of
each worker (puna.rpc.worker), and before it connects to one.
"""

from __future__ import annotations

import re
import socket
import struct
from enum import IntEnum

# RPC_PROTO_MAJOR_VERSION and RPC_PROTO_MINOR_VERSION. The library refuses another major version, and a newer minor one.
VERSION = (7, 0)

# Both hellos end in bytes that offer other ways than TCP; zeros offer none.
CAPABILITY_BYTES = 24
HELLO_REPLY_BYTES = 4 + CAPABILITY_BYTES
_HEAD = struct.Struct("<BQ")
_LENGTH = struct.Struct("<Q")
_MAX_ANSWER_BYTES = 1 << 20  # of those that are read as a whole

_DEVICE = re.compile(r"RPC(\d+)\[([^\]]+)\]")


class Command(IntEnum):
    """enum rpc_cmd."""

    ALLOC_BUFFER = 0
    GET_ALIGNMENT = 1
    GET_MAX_SIZE = 2
    BUFFER_GET_BASE = 3
    FREE_BUFFER = 4
    BUFFER_CLEAR = 5
    SET_TENSOR = 6
    SET_TENSOR_HASH = 7
    GET_TENSOR = 8
    COPY_TENSOR = 9
    GRAPH_COMPUTE = 10
    GET_DEVICE_MEMORY = 11
    INIT_TENSOR = 12
    GET_ALLOC_SIZE = 13
    HELLO = 14
    DEVICE_COUNT = 15
    GRAPH_RECOMPUTE = 16
    MEMSET_TENSOR = 17


ANSWERED = frozenset(
    (
        *(Command.ALLOC_BUFFER, Command.GET_ALIGNMENT, Command.GET_MAX_SIZE, Command.BUFFER_GET_BASE, Command.SET_TENSOR_HASH),
        *(Command.GET_TENSOR, Command.COPY_TENSOR, Command.GET_DEVICE_MEMORY, Command.GET_ALLOC_SIZE, Command.HELLO),
        Command.DEVICE_COUNT,
    )
)


class ProtocolError(Exception):
    """The other side says what the protocol does not have."""


def device_name(endpoint: str, index: int) -> str:
    """As the library calls the memory of that device."""
    return f"RPC{index}[{endpoint}]"


def endpoint_of(device: str) -> str:
    """``host:port`` of the worker whose device it is; empty where it is no worker's."""
    found = _DEVICE.fullmatch(device)
    return found.group(2) if found else ""


def receive(sock: socket.socket, n_bytes: int) -> bytes:
    """Errors: ConnectionError where the other side ends before so many bytes; OSError."""
    parts = bytearray()
    while len(parts) < n_bytes:
        part = sock.recv(min(n_bytes - len(parts), 1 << 20))
        if not part:
            raise ConnectionError("the other side has closed the connection")
        parts += part
    return bytes(parts)


def receive_head(sock: socket.socket) -> tuple[Command, int]:
    """A command and how many bytes follow.

    Errors: ProtocolError; as receive.
    """
    number, n_bytes = _HEAD.unpack(receive(sock, _HEAD.size))
    try:
        return Command(number), n_bytes
    except ValueError:
        raise ProtocolError(f"there is no command {number}") from None


def head(command: Command, n_bytes: int) -> bytes:
    return _HEAD.pack(command, n_bytes)


def receive_length(sock: socket.socket) -> int:
    """Of an answer."""
    return int(_LENGTH.unpack(receive(sock, _LENGTH.size))[0])


def framed(answer: bytes) -> bytes:
    return _LENGTH.pack(len(answer)) + answer


def ask(sock: socket.socket, command: Command, payload: bytes = b"") -> bytes:
    """Errors: ProtocolError for an answer that no such question has; as receive."""
    sock.sendall(head(command, len(payload)) + payload)
    n_bytes = receive_length(sock)
    if n_bytes > _MAX_ANSWER_BYTES:
        raise ProtocolError(f"an answer of {n_bytes} bytes")
    return receive(sock, n_bytes)


def unpacked(layout: str, data: bytes) -> tuple[int, ...]:
    """Errors: ProtocolError where there are more or fewer bytes."""
    try:
        return struct.unpack(f"<{layout}", data)
    except struct.error:
        raise ProtocolError(f"a message of {len(data)} bytes instead of {struct.calcsize(f'<{layout}')}") from None


def greet(sock: socket.socket) -> tuple[int, int]:
    """The version that the other side speaks.

    Errors: ProtocolError; OSError.
    """
    reply = ask(sock, Command.HELLO, bytes(CAPABILITY_BYTES))
    if len(reply) < 3:
        raise ProtocolError(f"a greeting of {len(reply)} bytes")
    return reply[0], reply[1]


def is_spoken(version: tuple[int, int]) -> bool:
    """Whether the library talks with who speaks that."""
    return version[0] == VERSION[0] and version[1] <= VERSION[1]
