"""``POST /api/embed``, ``POST /api/embeddings`` and ``POST /v1/embeddings``.

Source: Ollama's REST API and its OpenAI compatibility.
"""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from puna import wire
from puna.api import go_json
from puna.api.embed import EmbeddingsRequest, EmbedRequest, OpenAIEmbeddingsRequest
from puna.errors import BadRequest
from puna.server.answering.embedding import Embedded, open_model, vectors_of
from puna.server.checking.check import Caller
from puna.server.http.bodies import json_response, read_json
from puna.server.http.errors import JSON_CONTENT_TYPE

_WRITE_ASIDE = 1 << 16  # numbers; writing more than that as JSON would keep other requests waiting


async def embed(request: Request) -> Response:
    caller = Caller.of(request)
    message = await read_json(request, EmbedRequest)
    model = await open_model(caller, message.model)
    wanted = wire.EmbeddingRequest(inputs=[*message.input], truncate=message.truncate, dimensions=message.dimensions)
    embedded = await vectors_of(caller, model, message, wanted, message.unused)
    if embedded is None:
        return json_response({"model": message.model, "embeddings": []})
    counts: dict[str, Any] = {
        "total_duration": embedded.total_ns,
        "load_duration": embedded.load_ns,
        "prompt_eval_count": embedded.reply.prompt_eval_count,
    }
    if embedded.reply.truncated_count:
        counts["truncated_count"] = embedded.reply.truncated_count
    counts |= _warnings(embedded)
    return await _respond({"model": message.model, "embeddings": embedded.reply.embeddings, **counts}, embedded)


async def embeddings(request: Request) -> Response:
    caller = Caller.of(request)
    message = await read_json(request, EmbeddingsRequest)
    if not message.model:
        raise BadRequest("model is required")
    model = await open_model(caller, message.model)
    inputs = [message.prompt] if message.prompt else []
    wanted = wire.EmbeddingRequest(inputs=[*inputs], truncate=False, normalize=False)
    embedded = await vectors_of(caller, model, message, wanted, message.unused)
    if embedded is None:
        return json_response({"embedding": []})
    return json_response({"embedding": embedded.reply.embeddings[0], **_warnings(embedded)})


async def openai_embeddings(request: Request) -> Response:
    caller = Caller.of(request)
    message = await read_json(request, OpenAIEmbeddingsRequest)
    if not message.input:
        raise BadRequest("invalid input")
    model = await open_model(caller, message.model)
    wanted = wire.EmbeddingRequest(inputs=[*message.input], dimensions=message.dimensions)
    embedded = await vectors_of(caller, model, EmbedRequest(model=message.model), wanted, message.unused)
    assert embedded is not None
    vectors: Sequence[Any] = embedded.reply.embeddings
    if message.encoding_format == "base64":
        vectors = [base64.b64encode(struct.pack(f"<{len(v)}f", *v)).decode() for v in vectors]
    n_tokens = embedded.reply.prompt_eval_count
    usage: dict[str, Any] = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    if embedded.reply.truncated_count:
        usage["prompt_tokens_details"] = {"truncated_tokens": embedded.reply.truncated_count}
    body = {
        "object": "list",
        "data": [{"object": "embedding", "embedding": vector, "index": i} for i, vector in enumerate(vectors)],
        "model": message.model,
        "usage": usage,
        **_warnings(embedded),
    }
    return await _respond(body, embedded)


def _warnings(embedded: Embedded) -> dict[str, list[str]]:
    return {"warnings": embedded.warnings} if embedded.warnings else {}


async def _respond(body: dict[str, Any], embedded: Embedded) -> Response:
    vectors = embedded.reply.embeddings
    if len(vectors) * len(vectors[0]) <= _WRITE_ASIDE:
        return json_response(body)
    return Response(await asyncio.to_thread(go_json.dumps, body), media_type=JSON_CONTENT_TYPE)


routes = [
    Route("/api/embed", embed, methods=["POST"]),
    Route("/api/embeddings", embeddings, methods=["POST"]),
    Route("/v1/embeddings", openai_embeddings, methods=["POST"]),
]
