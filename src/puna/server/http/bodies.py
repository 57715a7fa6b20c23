"""The bodies of requests, as they come in.

A long body is decoded and checked in a thread, so that it keeps nobody waiting, and the bodies of all requests that are
being served have a bound together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from puna.api import go_json
from puna.errors import BadRequest, Overloaded
from puna.server.http.zstd import decompressed

M = TypeVar("M", bound=go_json.Request)
T = TypeVar("T")

MAX_BODY_BYTES = 128 << 20  # a chat with some dozen photographs
MAX_IN_FLIGHT = 512 << 20  # of all requests that are being served
ALWAYS_FREE = 64 << 10  # of each request; also how much is decoded at once, since a thread would take longer
MAX_DECOMPRESSED = 20 << 20


async def read_json(request: Request, kind: type[M]) -> M:
    """The body as a message, whatever its content type says.

    Errors: BadRequest; HTTPException 413 when it is too large; Overloaded when all together are.
    """
    body = await read_body(request)
    if request.url.path.startswith("/v1/") and request.headers.get("content-encoding", "").lower() == "zstd":
        try:
            body = await _aside(decompressed, body, MAX_DECOMPRESSED)
        except ValueError as error:
            what = "zstd body" if request.url.path == "/v1/responses" else "request body"
            raise BadRequest(f"failed to decompress {what}") from error
        share_of(request).take(len(body))
    return go_json.parse(kind, body) if len(body) <= ALWAYS_FREE else await _aside(go_json.parse, kind, body)


_decoders = ThreadPoolExecutor(2, "json")  # of their own: bodies that take long must not keep the store's work waiting


async def _aside(function: Callable[..., T], *arguments: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(_decoders, function, *arguments)


class Share:
    """What one request takes of the memory for bodies."""

    def __init__(self, all_bodies: BodiesInFlight) -> None:
        self._all = all_bodies
        self.n_bytes = 0
        self._n_counted = 0

    def take(self, n_bytes: int) -> None:
        """Errors: Overloaded."""
        self.n_bytes += n_bytes
        more = max(0, self.n_bytes - ALWAYS_FREE) - self._n_counted
        if more and self._all.n_bytes + more > MAX_IN_FLIGHT:
            raise Overloaded("server busy, please try again.  too many large request bodies at once")
        self._n_counted += more
        self._all.n_bytes += more

    def release(self) -> None:
        self._all.n_bytes -= self._n_counted
        self._n_counted = 0


class BodiesInFlight:
    """Gives each request its share, until it is over: what came in is kept until then, in this form or another."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.n_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        share = scope.setdefault("state", {})["body_share"] = Share(self)
        try:
            await self._app(scope, receive, send)
        finally:
            share.release()


def share_of(request: Request) -> Share:
    share: Share = request.state.body_share
    return share


async def read_body(request: Request, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    parts: list[bytes] = []
    share = share_of(request)
    n_bytes = 0
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise HTTPException(413, "http: request body too large")
    async for part in request.stream():
        n_bytes += len(part)
        if n_bytes > max_bytes:
            raise HTTPException(413, "http: request body too large")
        share.take(len(part))
        parts.append(part)
    return b"".join(parts)


async def checked(request: Request, make: Callable[[], T]) -> T:
    """Translating a request finds what its types did not. A long one is translated where it was decoded.

    Errors: BadRequest.
    """
    return _checked(make) if share_of(request).n_bytes <= ALWAYS_FREE else await _aside(_checked, make)


def _checked(make: Callable[[], T]) -> T:
    try:
        return make()
    except ValidationError as error:
        raise BadRequest(error.errors(include_url=False)[0]["msg"]) from error
    except ValueError as error:
        raise BadRequest(str(error)) from error
