"""``GET /metrics`` for Prometheus, and ``GET /health`` for whoever watches whether the server is there."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from puna.server.http.replies import json_response
from puna.server.pipeline import Pipeline


async def metrics(request: Request) -> Response:
    from puna.server import exposition  # with a library that nobody else needs

    return Response(await exposition.text(Pipeline.of(request).metrics), headers={"content-type": exposition.CONTENT_TYPE})


async def health(_: Request) -> Response:
    return json_response({"status": "ok"})


routes = [Route("/metrics", metrics, methods=["GET"]), Route("/health", health, methods=["GET", "HEAD"])]
