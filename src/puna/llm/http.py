"""A small HTTP/1.1 client for one peer on loopback: one connection per request, bodies streamed as lines.

A token costs one line, so this path is kept short: httptools parses, an asyncio.Protocol collects (20 microseconds of CPU
a line where httpx takes 88, for lines that arrive one by one). Closing a response
closes its connection, which is how a runner learns that nobody waits for the answer any more.
Knows nothing of runners and their messages.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import cast

import httptools

_HIGH_WATER = 64 * 1024  # bytes that may wait for the reader before the socket is paused
_MAX_LINE = 16 * 1024 * 1024


class BrokenStreamError(ConnectionError):
    """The peer closed, or sent what is no HTTP, before its answer was complete."""


class _Connection(asyncio.Protocol):
    """Collects one response; the reader is woken through a future."""

    def __init__(self) -> None:
        self.status = 0
        self.complete = False
        self.error: Exception | None = None
        self.chunks: deque[bytes] = deque()
        self._n_waiting_bytes = 0
        self._paused = False
        self._wake: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(BrokenStreamError(f"not an HTTP response: {error}"))
        self._notify()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.complete:
            self._fail(BrokenStreamError(str(exc) if exc else "the connection was closed before the answer was complete"))
        self._notify()

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.chunks.append(body)
        self._n_waiting_bytes += len(body)
        if self._n_waiting_bytes > _HIGH_WATER and not self._paused and self._transport is not None:
            self._transport.pause_reading()
            self._paused = True

    def on_message_complete(self) -> None:
        self.complete = True
        self.close()

    def send(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    async def wait_status(self) -> int:
        while not self.status:
            if self.error:
                raise self.error
            await self._sleep()
        return self.status

    async def next_chunk(self) -> bytes:
        """What arrived since the last call; empty at the end.

        Errors: BrokenStreamError when the connection ends before the message does.
        """
        while not self.chunks:
            if self.complete:
                return b""
            if self.error:
                raise self.error
            await self._sleep()
        data = b"".join(self.chunks) if len(self.chunks) > 1 else self.chunks[0]
        self.chunks.clear()
        self._n_waiting_bytes = 0
        if self._paused and self._transport is not None and not self.complete:
            self._transport.resume_reading()
            self._paused = False
        return data

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _fail(self, error: Exception) -> None:
        self.error = self.error or error
        self.close()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def _sleep(self) -> None:
        self._wake = asyncio.get_running_loop().create_future()
        await self._wake


class Response:
    """A response whose head has arrived; use as a context manager."""

    def __init__(self, connection: _Connection) -> None:
        self.status = connection.status
        self._connection = connection

    async def __aenter__(self) -> Response:
        return self

    async def __aexit__(self, *args: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    async def read(self) -> bytes:
        parts = []
        while chunk := await self._connection.next_chunk():
            parts.append(chunk)
        return b"".join(parts)

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """Lines without their end, empty ones left out; text after the last line end counts as a line."""
        rest = b""
        while chunk := await self._connection.next_chunk():
            *whole, rest = (rest + chunk).split(b"\n")
            if len(rest) > _MAX_LINE:
                raise BrokenStreamError("a line is longer than 16 MiB")
            for line in whole:
                if line:
                    yield line
        if rest:
            yield rest


async def request(port: int, method: str, path: str, body: bytes = b"") -> Response:
    """Send a request to 127.0.0.1 and return when the head of the answer is there.

    Errors: OSError when the connection is refused, BrokenStreamError when it ends early.
    """
    _, connection = await asyncio.get_running_loop().create_connection(_Connection, "127.0.0.1", port)
    head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    try:
        connection.send(head.encode() + body)
        await connection.wait_status()
    except BaseException:
        connection.close()
        raise
    return Response(connection)
