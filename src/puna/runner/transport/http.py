"""A runner's HTTP door, for a person with curl: the paths of puna.wire, and /completion with lines of replies.

Does nothing itself: what comes in goes through the same Channel as a parent's commands. Whoever comes must bring the key
that was printed beside the port, since every user of the machine, and every web page in a browser, can reach a port.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import logging
from collections import deque
from collections.abc import Callable, Generator

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from puna.errors import PunaError
from puna.runner.failures import failed
from puna.runner.service import EngineService
from puna.runner.transport.calls import PATHS
from puna.runner.transport.channel import Channel
from puna.runner.transport.counters import Counters
from puna.runner.transport.named_model import NamedModel
from puna.wire import (
    MAX_QUEUED_CHARACTERS,
    Answer,
    Call,
    Cancel,
    Complete,
    CompletionRequest,
    Discovery,
    Failed,
    Piece,
    Reply,
    decode,
)

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 256 << 20

_JSON = [(b"content-type", b"application/json")]
_LINES = [(b"content-type", b"application/x-ndjson")]
_encoder = msgspec.json.Encoder()


class Replies:
    """One command's replies on their way from any thread (emit) to the event loop (take).

    The engine never waits: a reader who does not keep up makes the queue longer, up to a bound, where the request fails.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_overflow: Callable[[], None], max_queued: int = MAX_QUEUED_CHARACTERS
    ) -> None:
        self.is_abandoned = False  # the reader has left
        self._on_overflow = on_overflow
        self._has_ended = False  # the terminal reply is in the queue
        self._max_queued = max_queued
        self._loop = loop
        self._queue: deque[Reply] = deque()
        self._n_put = 0  # characters; written by the thread that emits only
        self._n_taken = 0  # written by the event loop only
        self._is_waiting = False
        self._wake = asyncio.Event()

    def emit(self, reply: Reply) -> None:
        """Add a reply; whatever follows the terminal one is dropped. Any one thread; never blocks, never raises."""
        if self._has_ended or self.is_abandoned:
            return
        if type(reply) is Piece:
            self._n_put += reply.weight
            if self._n_put - self._n_taken > self._max_queued:
                reply = Failed(error=f"the client has left {self._max_queued} characters unread", status=500)
                self._call(self._on_overflow)
        self._has_ended = type(reply) is not Piece
        self._queue.append(reply)
        # Appended first, looked at second, while take() does the reverse: no reply can slip between.
        if self._is_waiting:
            self._is_waiting = False
            self._call(self._wake.set)

    def _call(self, function: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # the event loop is closed: the process is ending, and nobody listens
            log.debug("a reply came after the end of the event loop")

    def abandon(self) -> None:
        """The reader has left; on the event loop's thread."""
        self.is_abandoned = True
        self._wake.set()

    async def take(self) -> list[Reply]:
        """All that has come since the last call, at least one; empty only when the reader has left."""
        while not self._queue and not self.is_abandoned:
            self._wake.clear()
            self._is_waiting = True
            if not self._queue:
                await self._wake.wait()
        if self.is_abandoned:
            return []
        self._is_waiting = False
        batch: list[Reply] = []
        while self._queue:
            reply = self._queue.popleft()
            if type(reply) is Piece:
                self._n_taken += reply.weight
            batch.append(reply)
        return batch


class Door:
    """Hands commands to a channel and its replies to who asked; each queue has its own bound, so nothing is unsent here."""

    n_unsent = 0

    def __init__(self, service: EngineService, counters: Counters, devices: Callable[[], Discovery]) -> None:
        self._channel = Channel(service, self, NamedModel(), counters, devices)
        self._numbers = itertools.count()
        self._open: dict[int, Replies] = {}

    def put(self, number: int, reply: Reply) -> None:
        replies = self._open.get(number)
        if replies is not None:
            replies.emit(reply)

    def flush(self) -> None:
        """Every reply has left already."""

    def next_number(self) -> int:
        return next(self._numbers)

    @contextlib.contextmanager
    def open_for(self, command: Complete | Call) -> Generator[Replies]:
        """Give a command, and cancel it when the block ends."""
        number = command.id
        self._open[number] = replies = Replies(asyncio.get_running_loop(), lambda: self._channel.do(Cancel(id=number)))
        try:
            self._channel.do(command)
            yield replies
        finally:
            del self._open[number]
            self._channel.do(Cancel(id=number))

    def close(self) -> None:
        self._channel.close()


async def read_body(receive: Receive) -> bytes | None:
    """The request's body; None when the client left before its end."""
    parts: list[bytes] = []
    n_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        n_bytes += len(part)
        if n_bytes > MAX_BODY_BYTES:
            raise HTTPException(413, f"the request is larger than {MAX_BODY_BYTES} bytes")
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


class Endpoint:
    """One path as a bare ASGI application: it watches for a client that leaves while it waits and streams.

    The status line is sent with the first reply, so a request that fails before any text has a proper HTTP status.
    """

    def __init__(self, door: Door) -> None:
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(receive)
        if body is None:
            return
        path: str = scope["path"]
        if path == "/completion":
            request = decode(CompletionRequest, body)
            command: Complete | Call = Complete(id=self._door.next_number(), request=request)
        else:
            command = Call(id=self._door.next_number(), path=path, body=msgspec.Raw(body or b"{}"))
        with self._door.open_for(command) as replies:
            watcher = asyncio.create_task(_watch(receive, replies))
            try:
                await _stream(replies, send)
            finally:
                watcher.cancel()


async def _watch(receive: Receive, replies: Replies) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    replies.abandon()


async def _stream(replies: Replies, send: Send) -> None:
    """Send replies until the terminal one, or until the client has left."""
    has_started = False
    while batch := await replies.take():
        first, last = batch[0], batch[-1]
        has_ended = type(last) is not Piece
        if not has_started and isinstance(first, Failed):
            await _send_error(send, first.status if 400 <= first.status < 600 else 500, first.error)
            return
        if isinstance(first, Answer):
            await send({"type": "http.response.start", "status": 200, "headers": _JSON})
            await send({"type": "http.response.body", "body": bytes(first.body)})
            return
        if not has_started:
            await send({"type": "http.response.start", "status": 200, "headers": _LINES})
            has_started = True
        await send({"type": "http.response.body", "body": _encoder.encode_lines(batch), "more_body": not has_ended})
        if has_ended:
            return


async def _send_error(send: Send, status: int, error: str) -> None:
    await send({"type": "http.response.start", "status": status, "headers": _JSON})
    await send({"type": "http.response.body", "body": msgspec.json.encode({"error": error})})


async def _answer_error(_: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return JSONResponse({"error": error.detail}, error.status_code, headers=error.headers)
    reply = failed(error)  # the trace of an internal error is logged by the server
    return JSONResponse({"error": reply.error}, reply.status)


class Keyed:
    """Let pass what brings the key."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = next((value for name, value in scope.get("headers", ()) if name == b"authorization"), b"")
        if scope["type"] == "http" and not hmac.compare_digest(given, self._expected):
            await _send_error(send, 401, "a runner answers those who bring its key: authorization: Bearer KEY")
        else:
            await self._app(scope, receive, send)


def make_app(service: EngineService, counters: Counters, door: Door, key: str) -> ASGIApp:
    """The ASGI application of a runner."""

    async def metrics(_: Request) -> Response:
        now = service.health()
        gauges = {"status": now.status, "active": now.active, "waiting": now.waiting, "steps": now.steps}
        return JSONResponse(gauges | {"completions": counters.counts()})

    endpoint = Endpoint(door)
    methods = {"/health": ["GET"], "/devices": ["GET"]}
    routes = [Route(path, endpoint, methods=methods.get(path, ["POST"])) for path in ("/completion", *PATHS)]
    app = Starlette(
        routes=[Route("/metrics", metrics), *routes],
        exception_handlers={PunaError: _answer_error, HTTPException: _answer_error, Exception: _answer_error},
    )
    return Keyed(app, key)
