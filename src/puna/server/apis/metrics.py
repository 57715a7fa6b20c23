"""``GET /metrics`` for Prometheus, and ``GET /health`` for whoever watches whether the server is there."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from puna.server.http.replies import json_response
from puna.server.metrics import CONTENT_TYPE
from puna.server.pipeline import Pipeline


async def metrics(request: Request) -> Response:
    return Response(await Pipeline.of(request).metrics.text(), headers={"content-type": CONTENT_TYPE})


async def health(_: Request) -> Response:
    return json_response({"status": "ok"})


routes = [Route("/metrics", metrics, methods=["GET"]), Route("/health", health, methods=["GET", "HEAD"])]
