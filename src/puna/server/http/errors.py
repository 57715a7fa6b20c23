"""From Puna's errors to HTTP statuses and bodies, in the shapes of the native, the OpenAI and the Anthropic API.

Source: Ollama's native error catalogue.
"""

from __future__ import annotations

import logging
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from puna import errors
from puna.api import go_json
from puna.server.http import request_id

log = logging.getLogger(__name__)

STATUS: dict[type[errors.PunaError], int] = {
    errors.BadRequest: 400,
    errors.ContextOverflow: 400,
    errors.InvalidName: 400,
    errors.TemplateError: 400,
    errors.Forbidden: 403,
    errors.NotFound: 404,
    errors.FileFormatError: 500,
    errors.MissingTensors: 500,
    errors.UnsupportedModel: 500,
    errors.LoadError: 500,
    errors.WorkerUnreachable: 502,
    errors.OutOfMemory: 500,
    errors.RunnerDied: 500,
    errors.WorkerLost: 502,
    errors.NodeLost: 502,
    errors.Overloaded: 503,
    errors.StoreError: 500,
    errors.DiskFull: 507,
    errors.SourceError: 502,
    errors.ServerUnreachable: 502,
    errors.NativeLibraryError: 500,
    errors.PunaError: 500,
}

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
_OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
}
JSON_CONTENT_TYPE = "application/json; charset=utf-8"


def status_of(error: errors.PunaError) -> int:
    """The status of the nearest class that has one."""
    return next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)


def native_body(text: str, status: int) -> dict[str, Any]:
    return {"error": text}


def openai_body(text: str, status: int) -> dict[str, Any]:
    kind = _OPENAI_TYPES.get(status, "api_error")
    return {"error": {"message": text, "type": kind, "param": None, "code": None}}


def anthropic_body(text: str, status: int) -> dict[str, Any]:
    error = {"type": _ANTHROPIC_TYPES.get(status, "api_error"), "message": text}
    return {"type": "error", "error": error, "request_id": request_id.current() or request_id.new_id()}


def body_for(path: str, text: str, status: int) -> dict[str, Any]:
    """In the shape that clients of this path understand."""
    if path.startswith("/v1/messages"):
        return anthropic_body(text, status)
    return openai_body(text, status) if path.startswith("/v1/") else native_body(text, status)


def describe(error: Exception) -> tuple[str, int]:
    """Text and status for the client; what was not raised on purpose is logged and not shown in full."""
    if isinstance(error, errors.PunaError):
        return str(error), status_of(error)
    log.error("internal error", exc_info=error)
    return f"internal server error: {type(error).__name__}", 500


def _respond(request: Request, text: str, status: int) -> Response:
    headers = {"retry-after": "1"} if status == 503 else None
    return Response(go_json.dumps(body_for(request.url.path, text, status)), status, headers, JSON_CONTENT_TYPE)


async def on_error(request: Request, error: Exception) -> Response:
    text, status = describe(error)
    if status >= 500:
        log.error("%s %s: %s", request.method, request.url.path, text)
    return _respond(request, text, status)


async def on_disconnect(request: Request, _: Exception) -> Response:
    """The client has left while it was sending its request: nobody reads an answer."""
    log.info("499 %s %s: request canceled", request.method, request.url.path)
    return Response(status_code=499)


async def on_http_error(request: Request, error: Exception) -> Response:
    """What the router raises for paths and methods it does not know."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return PlainTextResponse("404 page not found", 404)
    if error.status_code == 405:
        return PlainTextResponse("405 method not allowed", 405, error.headers)
    return _respond(request, error.detail, error.status_code)
