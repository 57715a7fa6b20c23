"""Which trace of the client's a request belongs to: its ``traceparent`` and ``tracestate`` headers (W3C Trace Context)."""

from __future__ import annotations

import contextvars

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

_NAMES = ("traceparent", "tracestate")
_MAX_LENGTH = 1024
_current: contextvars.ContextVar[tuple[tuple[str, str], ...]] = contextvars.ContextVar("trace_headers", default=())


def current() -> tuple[tuple[str, str], ...]:
    """Those of the request that is being served, as names and values; whether they mean anything is for others to say."""
    return _current.get()


class TraceContext:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            _current.set(tuple((name, headers[name][:_MAX_LENGTH]) for name in _NAMES if name in headers))
        await self._app(scope, receive, send)
