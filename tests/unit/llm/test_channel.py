"""The line between the server and a runner, from the server's side: what the other end may do to it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
import uvloop

from puna import wire
from puna.llm.channel import BrokenLineError, Channel
from tests.patience import PATIENCE_S

DONE: dict[str, Any] = {
    "type": "done",
    "reason": "stop",
    "prompt_eval_count": 1,
    "cached_count": 0,
    "prompt_eval_duration": 1,
    "eval_count": 1,
    "eval_duration": 1,
}


def piece(text: str) -> dict[str, Any]:
    return {"type": "piece", "content": text}


class Peer:
    """The runner's end, played by the test."""

    def __init__(self, channel: Channel, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.channel, self._reader, self.writer = channel, reader, writer

    async def command(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(await asyncio.wait_for(self._reader.readline(), PATIENCE_S))
        return found

    def say(self, *replies: tuple[int, dict[str, Any]]) -> None:
        self.writer.write(json.dumps(replies).encode() + b"\n")

    async def is_left(self) -> bool:
        return await asyncio.wait_for(self._reader.read(), PATIENCE_S) == b""


@asynccontextmanager
async def connected() -> AsyncIterator[Peer]:
    own, other = socket.socketpair()
    channel = Channel()
    await asyncio.get_running_loop().create_connection(lambda: channel, sock=own)
    reader, writer = await asyncio.open_connection(sock=other)
    try:
        yield Peer(channel, reader, writer)
    finally:
        channel.close()
        writer.close()
        await asyncio.sleep(0)


async def all_of(channel: Channel, prompt: str = "") -> list[wire.CompletionReply]:
    return [reply async for reply in channel.complete(wire.CompletionRequest(prompt=prompt))]


def texts(replies: list[wire.CompletionReply]) -> list[str]:
    assert isinstance(replies[-1], wire.Done)
    return [reply.content for reply in replies if isinstance(reply, wire.Piece)]


def test_replies_find_their_requests() -> None:
    async def scenario() -> None:
        async with connected() as peer:
            asked = [asyncio.create_task(all_of(peer.channel, prompt)) for prompt in "abc"]
            numbers = {}
            for _ in asked:
                command = await peer.command()
                numbers[command["request"]["prompt"]] = command["id"]
            a, b, c = numbers["a"], numbers["b"], numbers["c"]
            peer.say((a, piece("A")), (c, piece("C")), (999, piece("nobody's")))
            peer.say((b, DONE), (c, piece("D")), (a, DONE), (c, DONE))
            assert [texts(replies) for replies in await asyncio.gather(*asked)] == [["A"], [], ["C", "D"]]

    uvloop.run(scenario())


def test_a_line_may_come_in_any_pieces() -> None:
    async def scenario() -> None:
        async with connected() as peer:
            asked = asyncio.create_task(all_of(peer.channel))
            number = (await peer.command())["id"]
            for byte in json.dumps([[number, piece("\u20ac")], [number, DONE]]).encode() + b"\n":
                peer.writer.write(bytes([byte]))
                await asyncio.sleep(0)
            assert texts(await asked) == ["\u20ac"]

    uvloop.run(scenario())


def test_a_slow_reader_holds_up_nobody() -> None:
    async def scenario() -> None:
        async with connected() as peer, aclosing(peer.channel.complete(wire.CompletionRequest())) as slow:
            reading = asyncio.ensure_future(anext(slow))
            first = (await peer.command())["id"]
            peer.say((first, piece("begin")))
            assert await reading == wire.Piece(content="begin")
            quick = asyncio.create_task(all_of(peer.channel))
            second = (await peer.command())["id"]
            peer.say(*[(first, piece("x" * 1000))] * 100, (second, DONE))
            assert texts(await quick) == []
            peer.say((first, DONE))
            assert len([reply async for reply in slow]) == 101

    uvloop.run(scenario())


def test_a_reader_who_reads_nothing_fails_in_the_end_and_the_runner_may_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_QUEUED_CHARACTERS", 5000)

    async def scenario() -> None:
        async with connected() as peer, aclosing(peer.channel.complete(wire.CompletionRequest())) as slow:
            reading = asyncio.ensure_future(anext(slow))
            number = (await peer.command())["id"]
            peer.say((number, piece("begin")))
            await reading
            peer.say(*[(number, piece("x" * 1000))] * 7)
            assert await peer.command() == {"type": "cancel", "id": number}
            replies = [reply async for reply in slow]
            assert [len(reply.content) for reply in replies if isinstance(reply, wire.Piece)] == [1000] * 5
            assert replies[-1] == wire.Failed(error="the client has left 5000 characters unread")

    uvloop.run(scenario())


def test_leaving_cancels_once_and_what_comes_later_is_dropped() -> None:
    async def scenario() -> None:
        async with connected() as peer:
            asked = asyncio.create_task(all_of(peer.channel))
            number = (await peer.command())["id"]
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            assert await peer.command() == {"type": "cancel", "id": number}
            peer.say((number, piece("late")), (number, DONE))
            next_one = asyncio.create_task(all_of(peer.channel))
            following = (await peer.command())["id"]
            assert following != number
            peer.say((following, DONE))
            assert texts(await next_one) == []

    uvloop.run(scenario())


@pytest.mark.parametrize("nonsense", [b"hello\n", b"[[1]]\n", b'[[0, {"type": "song"}]]\n', b"\xff\n", b"{}\n"])
def test_a_runner_that_talks_nonsense_is_hung_up_on(nonsense: bytes) -> None:
    async def scenario() -> None:
        async with connected() as peer:
            asked = [asyncio.create_task(all_of(peer.channel)) for _ in range(2)]
            await peer.command()
            await peer.command()
            peer.writer.write(nonsense)
            for failure in await asyncio.gather(*asked, return_exceptions=True):
                assert isinstance(failure, BrokenLineError)
                assert "cannot be understood" in str(failure)
            assert await peer.is_left()
            with pytest.raises(BrokenLineError):
                await all_of(peer.channel)

    uvloop.run(scenario())


def test_the_end_of_the_line_ends_every_request() -> None:
    async def scenario() -> None:
        async with connected() as peer:
            asked = [asyncio.create_task(all_of(peer.channel)) for _ in range(3)]
            for _ in asked:
                number = (await peer.command())["id"]
            peer.say((number, DONE))
            peer.writer.close()
            results = await asyncio.gather(*asked, return_exceptions=True)
            assert [isinstance(result, BrokenLineError) for result in results] == [True, True, False]

    uvloop.run(scenario())
