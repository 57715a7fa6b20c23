from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from bench.load.client import Exchange

from tests.patience import PATIENCE_S

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
Handle = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


async def asked(handle: Handle, use: Callable[[Exchange], Awaitable[None]]) -> Exchange:
    """Start an exchange with a server that does *handle*, and let *use* go on with it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        try:
            await handle(head + await reader.readexactly(length), writer)
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        exchange = await Exchange.post(f"http://127.0.0.1:{port}/some/path", b'{"x": 1}')
        await use(exchange)
        return exchange


async def until_the_end(exchange: Exchange) -> None:
    await asyncio.wait_for(exchange.wait(), PATIENCE_S)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def test_parts_come_with_their_times() -> None:
    """And the answer ends with its last part, not with the connection."""
    received: list[bytes] = []
    times: list[float] = []
    seen, ended = asyncio.Event(), asyncio.Event()

    async def handle(request: bytes, writer: asyncio.StreamWriter) -> None:
        received.append(request)
        writer.write(HEAD + chunk(b"one"))
        await seen.wait()
        times.append(time.perf_counter())
        writer.write(chunk(b"two") + b"0\r\n\r\n")
        await ended.wait()
        times.append(time.perf_counter())

    async def use(exchange: Exchange) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await exchange.wait_for_parts(1)
            seen.set()
            await exchange.wait()
            ended.set()
            while len(times) < 2:
                await asyncio.sleep(0)

    exchange = asyncio.run(asked(handle, use))
    assert received[0].startswith(b"POST /some/path HTTP/1.1\r\n")
    assert received[0].endswith(b'\r\n\r\n{"x": 1}')
    assert (exchange.status, exchange.body, exchange.is_complete, exchange.error) == (200, b"onetwo", True, "")
    (first, _), (second, _) = exchange.parts
    in_order = [exchange.began, first, times[0], second, exchange.ended, times[1]]
    assert in_order == sorted(in_order)


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (HEAD + chunk(b"one"), "closed before the answer was complete"),
        (b"", "closed before the answer was complete"),
        (b"What?\r\n\r\n", "not an HTTP answer"),
    ],
)
def test_an_answer_that_breaks_off_is_an_error(sent: bytes, error: str) -> None:
    async def handle(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)

    exchange = asyncio.run(asked(handle, until_the_end))
    assert error in exchange.error
    assert not exchange.is_complete
    assert not exchange.was_aborted


def test_nobody_listens() -> None:
    async def ask() -> Exchange:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        return await (await Exchange.post(f"http://127.0.0.1:{port}/", b"")).wait()

    exchange = asyncio.run(ask())
    assert exchange.error.startswith("cannot connect")


def test_aborting_closes_the_connection() -> None:
    left: list[bool] = []

    async def handle(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(b"one"))
        try:
            while True:
                writer.write(chunk(b"more"))
                await writer.drain()
                await asyncio.sleep(0.01)
        except ConnectionError:
            left.append(True)

    async def leave(exchange: Exchange) -> None:
        await exchange.wait_for_parts(3)
        exchange.abort()
        n_parts = len(exchange.parts)
        await until_the_end(exchange)
        while not left:
            await asyncio.sleep(0.01)
        assert len(exchange.parts) == n_parts >= 3

    exchange = asyncio.run(asked(handle, leave))
    assert exchange.was_aborted
    assert (exchange.is_complete, exchange.error) == (False, "")


def test_what_has_ended_cannot_be_aborted() -> None:
    async def handle(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy")

    async def use(exchange: Exchange) -> None:
        await until_the_end(exchange)
        exchange.abort()
        await exchange.wait_for_parts(100)  # none will come: returns at once

    exchange = asyncio.run(asked(handle, use))
    assert (exchange.status, exchange.body) == (503, b"busy")
    assert not exchange.was_aborted
