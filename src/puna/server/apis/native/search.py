"""``POST /api/search``: models elsewhere, by words. Puna's own; for keys that may pull what is found."""

from __future__ import annotations

from dataclasses import asdict

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from puna.api.models import SearchRequest
from puna.errors import BadRequest
from puna.server.http.bodies import read_json
from puna.server.http.replies import json_response
from puna.server.pipeline import Pipeline


async def search_models(request: Request) -> Response:
    body = await read_json(request, SearchRequest)
    store = Pipeline.of(request).store
    if not body.query.strip():
        raise BadRequest("query is required")
    found = await to_thread.run_sync(lambda: store.search(body.query, body.host, body.limit, insecure=body.insecure))
    return json_response({"models": [asdict(model) for model in found]})


routes = [Route("/api/search", search_models, methods=["POST"])]
