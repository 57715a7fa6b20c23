"""The runner's HTTP interface over an EngineService; the endpoints are listed in ``puna.wire``.

Knows nothing of models or batches. The way of a token from the engine's thread to the socket is kept short: an append
to a queue, and one wake-up of the event loop for all that has come since the last.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from puna.errors import PunaError
from puna.runner.failures import failed, require_ready
from puna.runner.service import EngineService, Handle
from puna.runner.tally import Tally
from puna.wire import (
    MAX_QUEUED_CHARACTERS,
    CompletionReply,
    CompletionRequest,
    EmbeddingReply,
    EmbeddingRequest,
    Failed,
    LoadRequest,
    Message,
    Piece,
    Text,
    TokenizeRequest,
    Tokens,
    decode,
    encode,
)

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 256 << 20

_JSON = [(b"content-type", b"application/json")]
_LINES = [(b"content-type", b"application/x-ndjson")]
_encoder = msgspec.json.Encoder()


class Replies:
    """One request's replies on their way from the engine's thread (emit) to the event loop (take).

    The engine never waits: a reader who does not keep up makes the queue longer, up to a bound, where the request fails.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, max_queued: int = MAX_QUEUED_CHARACTERS) -> None:
        self.is_abandoned = False  # the reader has left
        self.has_overflown = False  # the engine computes for nobody: cancel
        self.on_overflow: Callable[[], None] | None = None
        self._has_ended = False  # the terminal reply is in the queue
        self._max_queued = max_queued
        self._loop = loop
        self._queue: deque[CompletionReply] = deque()
        self._n_put = 0  # characters; written by the engine's thread only
        self._n_taken = 0  # written by the event loop only
        self._is_waiting = False
        self._wake = asyncio.Event()

    def emit(self, reply: CompletionReply) -> None:
        """Add a reply; whatever follows the terminal one is dropped. Any one thread; never blocks, never raises."""
        if self._has_ended or self.is_abandoned:
            return
        if type(reply) is Piece:
            self._n_put += reply.weight
            if self._n_put - self._n_taken > self._max_queued:
                reply = Failed(error=f"the client has left {self._max_queued} characters unread", status=500)
                self._call(self._overflow)
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

    def _overflow(self) -> None:
        self.has_overflown = True
        if self.on_overflow is not None:
            self.on_overflow()

    def abandon(self) -> None:
        """The reader has left; on the event loop's thread."""
        self.is_abandoned = True
        self._wake.set()

    async def take(self) -> list[CompletionReply]:
        """All that has come since the last call, at least one; empty only when the reader has left."""
        while not self._queue and not self.is_abandoned:
            self._wake.clear()
            self._is_waiting = True
            if not self._queue:
                await self._wake.wait()
        if self.is_abandoned:
            return []
        self._is_waiting = False
        batch: list[CompletionReply] = []
        while self._queue:
            reply = self._queue.popleft()
            if type(reply) is Piece:
                self._n_taken += reply.weight
            batch.append(reply)
        return batch


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


class Completion:
    """POST /completion as a bare ASGI application: it watches for a client that leaves while it streams.

    The status line is sent with the first reply, so a request that fails before any text has a proper HTTP status.
    """

    def __init__(self, service: EngineService, tally: Tally) -> None:
        self._service = service
        self._tally = tally

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(receive)
        if body is None:
            return
        request = decode(CompletionRequest, body)
        require_ready(self._service)
        self._tally.add("requests")
        replies = Replies(asyncio.get_running_loop())
        watcher = asyncio.create_task(_watch(receive, replies))
        handle: Handle | None = None
        last: CompletionReply | None = None
        try:
            # Tokenizing a long prompt takes a while: other streams go on meanwhile.
            handle = await asyncio.to_thread(self._service.submit, request, replies.emit)
            replies.on_overflow = handle.cancel
            if replies.has_overflown:
                handle.cancel()
            last = await _stream(replies, send)
        finally:
            watcher.cancel()
            if last is None:
                replies.abandon()
                if handle is not None:
                    handle.cancel()
            self._tally.ended(last, was_refused=handle is None)


class Embedding:
    """POST /embedding: one reply, or none for a client that leaves before it is there."""

    def __init__(self, service: EngineService, tally: Tally) -> None:
        self._service = service
        self._tally = tally

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(receive)
        if body is None:
            return
        request = decode(EmbeddingRequest, body)
        require_ready(self._service)
        self._tally.add("embedding_requests")
        replied: asyncio.Future[EmbeddingReply | Failed] = asyncio.get_running_loop().create_future()
        left = asyncio.create_task(_leaves(receive))
        handle: Handle | None = None
        try:
            handle = await asyncio.to_thread(self._service.embed, request, _resolver(replied))
            either: list[asyncio.Future[Any]] = [replied, left]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if replied.done():
                await self._answer(replied.result(), send)
        finally:
            left.cancel()
            if handle is not None and not replied.done():
                handle.cancel()
            replied.cancel()

    async def _answer(self, reply: EmbeddingReply | Failed, send: Send) -> None:
        if isinstance(reply, Failed):
            await _send_error(send, reply.status if 400 <= reply.status < 600 else 500, reply.error)
            return
        self._tally.add("embedded_tokens", reply.prompt_eval_count)
        await send({"type": "http.response.start", "status": 200, "headers": _JSON})
        await send({"type": "http.response.body", "body": encode(reply)})


def _resolver(future: asyncio.Future[EmbeddingReply | Failed]) -> Callable[[EmbeddingReply | Failed], None]:
    """What the engine's thread calls to resolve a future of this loop; nobody may be waiting any more."""
    loop = asyncio.get_running_loop()

    def resolve(reply: EmbeddingReply | Failed) -> None:
        try:
            loop.call_soon_threadsafe(lambda: None if future.done() else future.set_result(reply))
        except RuntimeError:  # the event loop is closed: the process is ending, and nobody listens
            log.debug("a reply came after the end of the event loop")

    return resolve


async def _leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _watch(receive: Receive, replies: Replies) -> None:
    await _leaves(receive)
    replies.abandon()


async def _stream(replies: Replies, send: Send) -> CompletionReply | None:
    """Send replies until the terminal one, which is returned; None when the client left."""
    has_started = False
    while True:
        batch = await replies.take()
        if not batch:
            return None
        last = batch[-1]
        has_ended = type(last) is not Piece
        if not has_started:
            first = batch[0]
            if isinstance(first, Failed):
                await _send_error(send, first.status if 400 <= first.status < 600 else 500, first.error)
                return first
            await send({"type": "http.response.start", "status": 200, "headers": _LINES})
            has_started = True
        body = _encoder.encode_lines(batch)
        await send({"type": "http.response.body", "body": body, "more_body": not has_ended})
        if has_ended:
            return last


async def _send_error(send: Send, status: int, error: str) -> None:
    await send({"type": "http.response.start", "status": status, "headers": _JSON})
    await send({"type": "http.response.body", "body": msgspec.json.encode({"error": error})})


def _reply(message: Message) -> Response:
    return Response(encode(message), media_type="application/json")


async def _answer_error(_: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return JSONResponse({"error": error.detail}, error.status_code, headers=error.headers)
    reply = failed(error)  # the trace of an internal error is logged by the server
    return JSONResponse({"error": reply.error}, reply.status)


class RefuseBrowsers:
    """Turn away what a web page sends: pages reach loopback too, and browsers mark their POSTs with an Origin."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and any(name == b"origin" for name, _ in scope["headers"]):
            await _send_error(send, 403, "a runner does not serve web pages")
        else:
            await self._app(scope, receive, send)


def make_app(service: EngineService, tally: Tally) -> ASGIApp:
    """The ASGI application of a runner."""

    async def health(_: Request) -> Response:
        return _reply(service.health())

    async def metrics(_: Request) -> Response:
        now = service.health()
        gauges = {"status": now.status, "active": now.active, "waiting": now.waiting, "steps": now.steps}
        return JSONResponse(gauges | {"completions": tally.counts()})

    async def load(request: Request) -> Response:
        body = await read_body(request.receive)
        message = decode(LoadRequest, body or b"")
        return _reply(await asyncio.to_thread(service.load, message))

    async def tokenize(request: Request) -> Response:
        message = decode(TokenizeRequest, await read_body(request.receive) or b"")
        tokens = await asyncio.to_thread(service.tokenize, message.content, message.add_special)
        return _reply(Tokens(tokens=tokens))

    async def detokenize(request: Request) -> Response:
        message = decode(Tokens, await read_body(request.receive) or b"")
        return _reply(Text(content=await asyncio.to_thread(service.detokenize, message.tokens)))

    routes = [
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/load", load, methods=["POST"]),
        Route("/completion", Completion(service, tally), methods=["POST"]),
        Route("/embedding", Embedding(service, tally), methods=["POST"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]
    return RefuseBrowsers(
        Starlette(
            routes=routes,
            exception_handlers={PunaError: _answer_error, HTTPException: _answer_error, Exception: _answer_error},
        )
    )
