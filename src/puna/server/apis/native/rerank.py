"""``POST /api/rerank``: as OpenAI's, with the native API's counts and durations."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from puna.server.apis.ranking import ranked, results
from puna.server.apis.vectors import warnings_of
from puna.server.http.replies import json_response


async def rerank(request: Request) -> Response:
    message, found = await ranked(request)
    counts: dict[str, Any] = {
        "total_duration": found.total_ns,
        "load_duration": found.load_ns,
        "prompt_eval_count": found.reply.prompt_eval_count,
    }
    if found.reply.truncated_count:
        counts["truncated_count"] = found.reply.truncated_count
    counts |= warnings_of(found)
    return json_response({"model": message.model, "results": results(message, found.reply), **counts})


routes = [Route("/api/rerank", rerank, methods=["POST"])]
