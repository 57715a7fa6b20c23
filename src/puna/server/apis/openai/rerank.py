"""``POST /v1/rerank``. Source: Jina's and Cohere's rerank APIs."""

from __future__ import annotations

import secrets

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from puna.server.apis.openai.usage import prompt_usage
from puna.server.apis.ranking import ranked, results
from puna.server.apis.vectors import warnings_of
from puna.server.http.replies import json_response


async def rerank(request: Request) -> Response:
    message, found = await ranked(request)
    body = {
        "id": f"rerank-{secrets.token_hex(12)}",
        "object": "list",
        "model": message.model,
        "results": results(message, found.reply),
        "usage": prompt_usage(found.reply),
        **warnings_of(found),
    }
    return json_response(body)


routes = [Route("/v1/rerank", rerank, methods=["POST"])]
