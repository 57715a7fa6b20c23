"""``GET /api/status``, ``POST /api/me`` and ``POST /api/signout``: there are no accounts here, and no models elsewhere.

Source: Ollama's REST API, "Account, cloud, experimental".
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from puna.server.http.replies import json_response


async def status(_: Request) -> Response:
    return json_response({"cloud": {"disabled": True, "source": "none"}})


async def me(_: Request) -> Response:
    return json_response({"error": "unauthorized"}, 401)


async def signout(_: Request) -> Response:
    return json_response({"error": "you are not currently signed in"}, 401)


routes = [
    Route("/api/status", status, methods=["GET"]),
    Route("/api/me", me, methods=["POST"]),
    Route("/api/signout", signout, methods=["POST"]),
]
