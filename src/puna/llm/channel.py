"""The server's end of the line to one runner: requests go out and all replies come in over one socket.

A runner writes once per step, whatever the number of requests in it, so a token costs the server little more than its own
way to the client. Nobody's reading holds up another's: what a slow reader has not taken waits, up to a bound.

Knows the messages' envelopes, not what they mean. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator
from typing import cast

import msgspec

from puna import wire
from puna.errors import BadRequest


class BrokenLineError(ConnectionError):
    """The other end is gone, or was hung up on."""


class NonsenseError(BrokenLineError):
    """It says what cannot be understood."""


class _Mailbox:
    """What has come for one request and was not yet taken."""

    def __init__(self) -> None:
        self.replies: deque[wire.Reply] = deque()
        self.n_waiting = 0  # characters
        self._wake: asyncio.Future[None] | None = None

    def put(self, reply: wire.Reply) -> None:
        self.replies.append(reply)
        self.wake()

    def wake(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def wait(self) -> None:
        self._wake = asyncio.get_running_loop().create_future()
        await self._wake


class Channel(asyncio.Protocol):
    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._rest = bytearray()
        self._numbers = itertools.count()
        self._open: dict[int, _Mailbox] = {}
        self._error: BrokenLineError | None = None
        self._greeted = asyncio.Event()  # the runner has said something, or never will

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it

    def data_received(self, data: bytes) -> None:
        self._rest += data
        end = self._rest.rfind(b"\n", len(self._rest) - len(data))
        if end < 0:
            return
        lines = bytes(self._rest[:end]).split(b"\n")
        del self._rest[: end + 1]
        try:
            for line in lines:
                for number, reply in wire.decode_addressed(line):
                    self._deliver(number, reply)
        except BadRequest as error:
            self._break(NonsenseError(f"a reply cannot be understood: {error}"))
        self._greeted.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._break(BrokenLineError(str(exc) if exc else "the connection was closed"))

    def _deliver(self, number: int, reply: wire.Reply) -> None:
        mailbox = self._open.get(number)
        if mailbox is None:  # whoever asked has left
            return
        if isinstance(reply, wire.Piece):
            mailbox.n_waiting += reply.weight
            if mailbox.n_waiting > wire.MAX_QUEUED_CHARACTERS:
                self._cancel(number)
                reply = wire.Failed(error=f"the client has left {wire.MAX_QUEUED_CHARACTERS} characters unread")
        mailbox.put(reply)

    def _break(self, error: BrokenLineError) -> None:
        self._error = self._error or error
        for mailbox in self._open.values():
            mailbox.wake()
        self._greeted.set()
        self.close()

    async def greeted(self) -> None:
        """Wait for the first line, which says that there is a runner.

        Errors: BrokenLineError.
        """
        await self._greeted.wait()
        if self._error is not None:
            raise self._error

    def send(self, command: wire.Command) -> None:
        """Errors: BrokenLineError."""
        if self._error is not None or self._transport is None:
            raise self._error or BrokenLineError("there is no connection")
        self._transport.write(wire.encode(command) + b"\n")

    async def complete(self, request: wire.CompletionRequest) -> AsyncGenerator[wire.CompletionReply, None]:
        """Pieces, then exactly one Done or Failed. Closing the generator early cancels the request.

        Errors: BrokenLineError when the line ends before the last reply.
        """
        number, mailbox = next(self._numbers), _Mailbox()
        self.send(wire.Complete(id=number, request=request))
        self._open[number] = mailbox
        try:
            while True:
                reply = await self._next(mailbox)
                if not isinstance(reply, wire.Piece):
                    self._open.pop(number, None)
                    if isinstance(reply, wire.Answer):
                        raise NonsenseError("a completion was answered as a call is")
                    yield reply
                    return
                mailbox.n_waiting -= reply.weight
                yield reply
        finally:
            if number in self._open:
                self._cancel(number)

    async def call(self, path: str, body: bytes = b"{}") -> wire.Answer | wire.Failed:
        """Leaving early ends what can be ended of the work.

        Errors: BrokenLineError when the line ends before the answer.
        """
        number, mailbox = next(self._numbers), _Mailbox()
        self.send(wire.Call(id=number, path=path, body=msgspec.Raw(body)))
        self._open[number] = mailbox
        try:
            reply = await self._next(mailbox)
            self._open.pop(number, None)
            if not isinstance(reply, wire.Answer | wire.Failed):
                raise NonsenseError("a call was answered as a completion is")
            return reply
        finally:
            if number in self._open:
                self._cancel(number)

    async def _next(self, mailbox: _Mailbox) -> wire.Reply:
        while not mailbox.replies:
            if self._error is not None:
                raise self._error
            await mailbox.wait()
        return mailbox.replies.popleft()

    def _cancel(self, number: int) -> None:
        """Nothing more is delivered to this request, and the runner need not compute it."""
        del self._open[number]
        if self._error is None:
            self.send(wire.Cancel(id=number))

    def close(self) -> None:
        """The other end sees the end of its input."""
        if self._transport is not None:
            self._transport.abort()
