"""What goes out: JSON at once, or a body part by part."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from puna.api import go_json
from puna.server.http.errors import JSON_CONTENT_TYPE, describe

NDJSON = "application/x-ndjson"
EVENT_STREAM = "text/event-stream"


def json_response(value: Any, status: int = 200) -> Response:
    return Response(go_json.dumps(value), status, media_type=JSON_CONTENT_TYPE)


class Stream(Response):
    """A body sent part by part as the parts come.

    An error before the first part is raised, so that it gets a status of its own; a later one becomes the last part.
    Whatever ends the response, the generator is closed before it returns, and with it all that it holds.
    """

    def __init__(
        self, parts: AsyncGenerator[bytes, None], content_type: str, error_part: Callable[[str, int], bytes], **headers: str
    ) -> None:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        super().__init__(headers={"content-type": content_type, **given})
        del self.headers["content-length"]
        self._parts = parts
        self._error_part = error_part

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._parts) as parts:
            has_started = False
            try:
                async for part in parts:
                    if not has_started:
                        await self._start(send)
                        has_started = True
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            except Exception as error:  # the status is gone: the client can only be told in the body
                if not has_started:
                    raise
                await send({"type": "http.response.body", "body": self._error_part(*describe(error)), "more_body": True})
        if not has_started:
            await self._start(send)
        await send({"type": "http.response.body", "body": b""})

    async def _start(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
