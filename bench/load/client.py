"""A streaming HTTP client that costs little: it shares its cores with the server it measures.

While an answer arrives, its parts are kept with the time they came and nothing more; what they mean is read afterwards.
One connection per request. Knows nothing of the APIs.
"""

from __future__ import annotations

import asyncio
import time
from typing import Self, cast
from urllib.parse import urlsplit

import httptools


class Exchange(asyncio.Protocol):
    """One request and what came back; made by ``post`` and ``get``. Times are of ``time.perf_counter``."""

    def __init__(self) -> None:
        self.status = 0  # 0 until the head of the answer is there
        self.parts: list[tuple[float, bytes]] = []
        self.began = time.perf_counter()
        self.ended = 0.0
        self.is_complete = False
        self.was_aborted = False
        self.error = ""
        self._now = self.began
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()

    @classmethod
    async def _start(cls, method: str, url: str, body: bytes, key: str = "") -> Self:
        place = urlsplit(url)
        host, port = place.hostname or "127.0.0.1", place.port or 80
        exchange = cls()
        head = (
            f"{method} {place.path or '/'} HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n" + (f"authorization: Bearer {key}\r\n" if key else "") + "\r\n"
        )
        try:
            await asyncio.get_running_loop().create_connection(lambda: exchange, host, port)
        except OSError as error:
            exchange._end(f"cannot connect: {error}")
        else:
            assert exchange._transport is not None
            exchange._transport.write(head.encode() + body)
        return exchange

    @classmethod
    async def post(cls, url: str, body: bytes, key: str = "") -> Self:
        """Send a request; returns at once. What goes wrong, the connection included, is in ``error``."""
        return await cls._start("POST", url, body, key)

    @classmethod
    async def get(cls, url: str) -> Self:
        return await (await cls._start("GET", url, b"")).wait()

    @property
    def has_ended(self) -> bool:
        return self._done.done()

    @property
    def body(self) -> bytes:
        return b"".join(part for _, part in self.parts)

    def abort(self) -> None:
        """Leave, as a client does that closes its connection. What has ended stays as it is."""
        if not self.has_ended:
            self.was_aborted = True
            self._end("")

    async def wait(self) -> Self:
        """Return when the answer is complete, the connection broken or the exchange aborted."""
        await asyncio.shield(self._done)
        return self

    async def wait_for_parts(self, count: int) -> None:
        """Return when so many parts are there, or none will come any more."""
        while len(self.parts) < count and not self.has_ended:
            await asyncio.sleep(0.003)

    def _end(self, error: str) -> None:
        if not self.has_ended:
            self.error = error
            self.ended = time.perf_counter()
            self._done.set_result(None)
        if self._transport is not None:
            self._transport.abort()

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"not an HTTP answer: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"the connection broke: {exc}" if exc else "the connection was closed before the answer was complete")

    # Called by the parser.

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if not self.has_ended:
            self.parts.append((self._now, body))

    def on_message_complete(self) -> None:
        if not self.has_ended:
            self.is_complete = True
            self._end("")
