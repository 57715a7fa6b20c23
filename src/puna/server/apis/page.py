"""``GET /`` for browsers, and ``GET /web/...``: the page and its files, which may load nothing from anywhere else.

What the page may do stands in its content security policy: its own modules and styles, requests to this server, and
pictures that it made itself. Nobody may frame it, and text never becomes markup but through the sanitiser.
"""

from __future__ import annotations

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from puna.errors import NotFound
from puna.web import files

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob: data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-cache",  # kept, and asked for again: after an update no page is half old
}


async def page(request: Request) -> Response:
    response = await _file(request, files.INDEX)
    response.headers["vary"] = "Accept"
    return response


async def file(request: Request) -> Response:
    return await _file(request, "{folder}/{name}".format(**request.path_params))


async def _file(request: Request, path: str) -> Response:
    found = (await to_thread.run_sync(files.read)).get(path)
    if found is None:
        raise NotFound(f"there is no {request.url.path[:200]}")
    tag = f'"{found.tag}"'
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers={**HEADERS, "etag": tag})
    return Response(found.content, headers={**HEADERS, "etag": tag, "content-type": found.content_type})


routes = [Route("/web/{folder}/{name}", file, methods=["GET"])]
