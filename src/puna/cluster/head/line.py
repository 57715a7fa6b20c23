"""A head's end of the line to one node: requests go out, and what they are answered with comes in, each to whom it is for.

A node that says nothing for LOST_AFTER_S is taken for lost, as one whose line breaks: all that waits hears of it at once. So is a
head by its nodes, to which it says from time to time that it is there.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from puna import __version__, wire
from puna.cluster import messages
from puna.cluster.messages import (
    ALIVE_S,
    LOST_AFTER_S,
    MAX_FRAME_BYTES,
    WINDOW,
    Alive,
    Answer,
    Ask,
    Cancel,
    Complete,
    Deliver,
    Held,
    Hold,
    Message,
    Model,
    Open,
    Opened,
    Refused,
    Report,
    Said,
    Taken,
    decode,
    encode,
    error_of,
    frame,
    read_frame,
)
from puna.errors import BadRequest, NodeLost, PunaError, StoreError

log = logging.getLogger(__name__)

M = TypeVar("M")

_PIECE_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 10.0


class NodeDeclines(NodeLost):
    """It retires, or has not got the model as it was believed to; what it has begun it finishes."""


@dataclass(frozen=True)
class Lease:
    """A Hold that was answered."""

    number: int
    held: Held


class Line:
    """Made by ``connect``. Belongs to one event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: tuple[str, int, str]) -> None:
        self.node = self.version = ""
        self.lost_after_s = LOST_AFTER_S
        self._reader, self._writer, self._address = reader, writer, address
        self._numbers = itertools.count(1)
        self._open: dict[int, _Mailbox] = {}
        self._error: NodeLost | None = None
        self._reading: asyncio.Task[None] | None = None
        self._living: asyncio.Task[None] | None = None
        self._on_report: Callable[[Report], None] = lambda _: None

    @classmethod
    async def connect(cls, host: str, port: int, key: str, head: str, on_report: Callable[[Report], None]) -> Line:
        """Errors: NodeLost when nobody answers who knows the key."""
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(host, port)
                writer.write(frame(Open(key=key, head=head, version=__version__)))
                opened = messages.decode_reply(await read_frame(reader))
            if not isinstance(opened, Opened):
                raise BadRequest("what answers there is no node")
        except BaseException as error:
            if writer is not None:
                writer.transport.abort()
            if isinstance(error, OSError | TimeoutError | BadRequest):
                raise NodeLost(f"the node at {host}:{port} cannot be reached: {error or type(error).__name__}") from error
            raise
        line = cls(reader, writer, (host, port, key))
        line._on_report = on_report
        line.node, line.version = opened.node, opened.version
        line._reading = asyncio.create_task(line._read(), name=f"line to node {line.node}")
        line._living = asyncio.create_task(line._stay_alive(), name=f"signs of life to node {line.node}")
        return line

    @property
    def is_lost(self) -> bool:
        return self._error is not None

    async def ended(self) -> None:
        """Returns when the line is of no more use."""
        assert self._reading is not None
        await asyncio.wait({self._reading})

    async def close(self) -> None:
        self._break(NodeLost("the server is shutting down"))
        await _ended(*(task for task in (self._reading, self._living) if task is not None))

    def lose(self, reason: str) -> None:
        """Somebody knows that the node is gone."""
        self._break(NodeLost(reason))

    def send(self, message: Message) -> None:
        """Errors: NodeLost."""
        if self._error is not None:
            raise self._error
        if self._writer.is_closing():  # whoever reads hears of it next
            raise NodeLost(f"the node {self.node} was lost: the connection was closed")
        self._writer.write(frame(message))

    async def ask(self, path: str, body: object, kind: type[M], model: Model | None = None, hold: int = 0) -> M:
        """Leaving early ends what can be ended of the work. *hold*: the number of the lease under which it is asked.

        Errors: NodeLost; what the node raises.
        """
        number = next(self._numbers)
        with _Mailbox(self, number) as mailbox:
            self.send(Ask(id=number, path=path, body=encode(body), model=model, hold=hold))
            return decode(kind, (await mailbox.answer()).body)

    @asynccontextmanager
    async def hold(self, model: Model) -> AsyncGenerator[Lease, None]:
        """The model stays loaded until the block ends, or the node is lost.

        Errors: NodeLost; what loading raises.
        """
        number = next(self._numbers)
        with _Mailbox(self, number) as mailbox:
            self.send(Hold(id=number, model=model))
            held = decode(Held, (await mailbox.answer()).body)
            mailbox.stays_open = True
            yield Lease(number, held)

    async def complete(
        self, model: Model, request: wire.CompletionRequest, hold: int = 0
    ) -> AsyncGenerator[wire.CompletionReply, None]:
        """Pieces, then exactly one Done or Failed. Closing the generator early cancels the request. *hold*: as for ask.

        Errors: NodeLost; what the node raises.
        """
        number, n_taken = next(self._numbers), 0
        with _Mailbox(self, number) as mailbox:
            self.send(Complete(id=number, model=model, request=request, hold=hold))
            while True:
                reply = (await mailbox.said()).reply
                if not isinstance(reply, wire.Piece):
                    mailbox.stays_open = False
                    yield reply
                    return
                n_taken += reply.weight
                if n_taken >= WINDOW // 2:
                    with suppress(NodeLost):
                        self.send(Taken(id=number, weight=n_taken))
                    n_taken = 0
                yield reply

    async def deliver(self, path: Path, digest: str, n_bytes: int) -> None:
        """Send a file over a connection of its own.

        Errors: NodeLost; StoreError when it cannot be read here; what the node raises.
        """
        assert self._reading is not None
        delivery = asyncio.create_task(self._delivered(path, Deliver(key=self._address[2], digest=digest, n_bytes=n_bytes)))
        try:
            await asyncio.wait({delivery, self._reading}, return_when=asyncio.FIRST_COMPLETED)
            if not delivery.done():  # a machine without power leaves that connection open
                raise self._error or NodeLost(f"the node {self.node} was lost while it was sent {path.name}")
            answer = delivery.result()
        except (OSError, BadRequest) as error:
            raise NodeLost(f"the node {self.node} was lost while it was sent {path.name}: {error}") from error
        finally:
            await _ended(delivery)
        if isinstance(answer, Refused):
            raise error_of(answer)

    async def _delivered(self, path: Path, delivery: Deliver) -> messages.Reply:
        """What the node says to it, which a refusal is before it has all."""
        reader, writer = await asyncio.open_connection(*self._address[:2])
        writer.write(frame(delivery))
        sending = asyncio.create_task(_send_file(path, writer))
        answering = asyncio.create_task(read_frame(reader))
        try:
            await asyncio.wait({sending, answering}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                sending.result()
            return messages.decode_reply(await answering)
        finally:
            await _ended(sending, answering)
            writer.close()

    async def _read(self) -> None:
        try:
            while True:
                self._take(messages.decode_reply(await read_frame(self._reader, MAX_FRAME_BYTES, self.lost_after_s)))
        except TimeoutError:
            self._break(NodeLost(f"the node {self.node} has said nothing for {self.lost_after_s:g} s"))
        except (OSError, BadRequest) as error:
            self._break(NodeLost(f"the node {self.node} was lost: {error}"))

    async def _stay_alive(self) -> None:
        """What waits to be sent is a sign of life, too."""
        with suppress(NodeLost):
            while True:
                await asyncio.sleep(ALIVE_S)
                if not self._writer.transport.get_write_buffer_size():
                    self.send(Alive())

    def _take(self, reply: messages.Reply) -> None:
        if isinstance(reply, Report):
            self._on_report(reply)
        elif not isinstance(reply, Opened) and (mailbox := self._open.get(reply.id)) is not None:
            mailbox.put(reply)

    def _break(self, error: NodeLost) -> None:
        self._error = self._error or error
        for mailbox in self._open.values():
            mailbox.wake()
        with suppress(OSError):
            self._writer.transport.abort()


class _Mailbox:
    """What has come for one request. When the block ends before the last reply, the request is cancelled."""

    def __init__(self, line: Line, number: int) -> None:
        self._line, self._number = line, number
        self._replies: deque[Answer | Said | Refused] = deque()
        self._wake: asyncio.Future[None] | None = None
        self.stays_open = True

    def __enter__(self) -> _Mailbox:
        self._line._open[self._number] = self
        return self

    def __exit__(self, *_: object) -> None:
        del self._line._open[self._number]
        if self.stays_open:
            with suppress(NodeLost):
                self._line.send(Cancel(id=self._number))

    def put(self, reply: Answer | Said | Refused) -> None:
        self._replies.append(reply)
        self.wake()

    def wake(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def answer(self) -> Answer:
        reply = await self._next()
        if not isinstance(reply, Answer):
            raise PunaError("a node answers what it was not asked")
        self.stays_open = False
        return reply

    async def said(self) -> Said:
        reply = await self._next()
        if not isinstance(reply, Said):
            raise PunaError("a node answers what it was not asked")
        return reply

    async def _next(self) -> Answer | Said:
        while not self._replies:
            if self._line._error is not None:
                raise self._line._error
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        reply = self._replies.popleft()
        if isinstance(reply, Refused):
            self.stays_open = False
            raise NodeDeclines(reply.message) if reply.is_declined else error_of(reply)
        return reply


async def _ended(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _send_file(path: Path, writer: asyncio.StreamWriter) -> None:
    """Errors: StoreError when it cannot be read; ConnectionError."""
    sent = 0
    while data := await asyncio.to_thread(_piece, path, sent):
        writer.write(data)
        await writer.drain()
        sent += len(data)


def _piece(path: Path, begin: int) -> bytes:
    """Opened for each: who is cancelled meanwhile leaves no open file behind."""
    try:
        with path.open("rb") as file:
            file.seek(begin)
            return file.read(_PIECE_BYTES)
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from error
