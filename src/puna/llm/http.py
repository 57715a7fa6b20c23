"""A small HTTP/1.1 client for one peer on loopback: one connection per request, the answer taken as a whole.

Leaving a request closes its connection, which is how a runner learns that nobody waits for the answer any more.
Knows nothing of runners and their messages.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import cast

import httptools


class BrokenAnswerError(ConnectionError):
    """The peer closed, or sent what is no HTTP, before its answer was complete."""


@dataclass(frozen=True)
class Response:
    status: int
    body: bytes


class _Connection(asyncio.Protocol):
    """Collects one response."""

    def __init__(self) -> None:
        self.response: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._body: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(BrokenAnswerError(f"not an HTTP response: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(BrokenAnswerError(str(exc) if exc else "the connection was closed before the answer was complete"))

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        if not self.response.done():
            self.response.set_result(Response(self._parser.get_status_code(), b"".join(self._body)))

    def _fail(self, error: Exception) -> None:
        if not self.response.done():
            self.response.set_exception(error)

    def send(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def close(self) -> None:
        self.response.cancel()
        if self._transport is not None:
            self._transport.abort()


async def request(port: int, method: str, path: str, body: bytes = b"") -> Response:
    """Ask 127.0.0.1.

    Errors: OSError when the connection is refused, BrokenAnswerError when it ends early.
    """
    _, connection = await asyncio.get_running_loop().create_connection(_Connection, "127.0.0.1", port)
    head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    try:
        connection.send(head.encode() + body)
        return await connection.response
    finally:
        connection.close()
