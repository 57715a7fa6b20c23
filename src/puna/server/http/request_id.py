"""Every request has an id: in the answer's headers, in the log, and in what the runner is told.

A sound ``X-Request-Id`` of the client or a proxy is kept, so that one id follows a request through all logs.
"""

from __future__ import annotations

import contextvars
import logging
import re
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger(__name__)

_MAX_PATH = 500  # characters of it in the log
_SOUND = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_current: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")


def current() -> str:
    """The id of the request that is being served; empty outside of any."""
    return _current.get()


def new_id() -> str:
    return f"req_{secrets.token_hex(12)}"


class InLog(logging.Filter):
    """Gives log records a ``request`` field: the id in brackets, or nothing."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request = f"[{current()}] " if current() else ""
        return True


class RequestIds:
    """Gives each request its id and logs how it ended; what only looks (GET, HEAD) and went well is a detail."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _SOUND.fullmatch(given) else new_id()
        token = _current.set(request_id)
        began, status = time.monotonic(), 499

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = headers["request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            level = logging.DEBUG if status < 400 and scope["method"] in ("GET", "HEAD") else logging.INFO
            seconds = time.monotonic() - began
            path = scope["path"][:_MAX_PATH]
            path = path if path.isprintable() else ascii(path)  # it may hold anything, also what looks like another line
            fields = {"method": scope["method"], "path": path, "status": status, "seconds": round(seconds, 6)}
            line = "%s %s %d in %.3f s"
            log.log(level, line, scope["method"], path, status, seconds, extra={"fields": fields})
            _current.reset(token)
