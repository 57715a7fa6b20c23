"""``POST /api/embed`` and ``POST /api/embeddings``. Source: Ollama's REST API."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from puna import wire
from puna.api.embed import EmbeddingsRequest, EmbedRequest
from puna.errors import BadRequest
from puna.server.apis.vectors import respond, texts_of, warnings_of
from puna.server.checking.request import EmbeddingRequest
from puna.server.http.bodies import read_json
from puna.server.http.caller import Caller
from puna.server.http.replies import json_response
from puna.server.pipeline import Pipeline


async def embed(request: Request) -> Response:
    caller = Caller.of(request)
    message = await read_json(request, EmbedRequest)
    texts = texts_of(message.input, truncate=message.truncate, dimensions=message.dimensions)
    embedding_request = EmbeddingRequest(caller, message.model, texts, message.options, message.keep_alive, message.unused)
    embedded = await Pipeline.of(request).embed(embedding_request)
    if embedded is None:
        return json_response({"model": message.model, "embeddings": []})
    counts: dict[str, Any] = {
        "total_duration": embedded.total_ns,
        "load_duration": embedded.load_ns,
        "prompt_eval_count": embedded.reply.prompt_eval_count,
    }
    if embedded.reply.truncated_count:
        counts["truncated_count"] = embedded.reply.truncated_count
    counts |= warnings_of(embedded)
    return await respond({"model": message.model, "embeddings": embedded.reply.embeddings, **counts}, embedded)


async def embeddings(request: Request) -> Response:
    caller = Caller.of(request)
    message = await read_json(request, EmbeddingsRequest)
    if not message.model:
        raise BadRequest("model is required")
    texts = wire.EmbeddingRequest(inputs=[message.prompt] if message.prompt else [], truncate=False, normalize=False)
    embedding_request = EmbeddingRequest(caller, message.model, texts, message.options, message.keep_alive, message.unused)
    embedded = await Pipeline.of(request).embed(embedding_request)
    if embedded is None:
        return json_response({"embedding": []})
    return json_response({"embedding": embedded.reply.embeddings[0], **warnings_of(embedded)})


routes = [
    Route("/api/embed", embed, methods=["POST"]),
    Route("/api/embeddings", embeddings, methods=["POST"]),
]
