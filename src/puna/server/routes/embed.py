"""``POST /api/embed``, ``POST /api/embeddings`` and ``POST /v1/embeddings``.

Source: Ollama's REST API and its OpenAI compatibility.
"""

from __future__ import annotations

import asyncio
import base64
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from puna import wire
from puna.api import go_json
from puna.api import options as model_options
from puna.api.embed import EmbeddingsRequest, EmbedRequest, OpenAIEmbeddingsRequest
from puna.errors import BadRequest, NotFound, UnsupportedModel
from puna.llm.load import wanted_load
from puna.server.bodies import json_response, read_json
from puna.server.errors import JSON_CONTENT_TYPE
from puna.server.requests import Caller
from puna.store.model import StoredModel

_UNSUPPORTED = "this model does not support embeddings"
_WRITE_ASIDE = 1 << 16  # numbers; writing more than that as JSON would keep other requests waiting


@dataclass(frozen=True)
class Embedded:
    """Vectors in the order of the inputs, with durations in nanoseconds from the request's beginning."""

    reply: wire.EmbeddingReply
    load_ns: int
    total_ns: int


async def embed(request: Request) -> Response:
    caller = Caller.of(request)
    message = await read_json(request, EmbedRequest)
    model = await _open(caller, message.model)
    wanted = wire.EmbeddingRequest(inputs=[*message.input], truncate=message.truncate, dimensions=message.dimensions)
    embedded = await _embed(caller, model, message, wanted)
    if embedded is None:
        return json_response({"model": message.model, "embeddings": []})
    counts = {
        "total_duration": embedded.total_ns,
        "load_duration": embedded.load_ns,
        "prompt_eval_count": embedded.reply.prompt_eval_count,
    }
    return await _respond({"model": message.model, "embeddings": embedded.reply.embeddings, **counts}, embedded)


async def embeddings(request: Request) -> Response:
    caller = Caller.of(request)
    message = await read_json(request, EmbeddingsRequest)
    if not message.model:
        raise BadRequest("model is required")
    model = await _open(caller, message.model)
    inputs = [message.prompt] if message.prompt else []
    embedded = await _embed(caller, model, message, wire.EmbeddingRequest(inputs=[*inputs], truncate=False, normalize=False))
    return json_response({"embedding": embedded.reply.embeddings[0] if embedded else []})


async def openai_embeddings(request: Request) -> Response:
    caller = Caller.of(request)
    message = await read_json(request, OpenAIEmbeddingsRequest)
    if not message.input:
        raise BadRequest("invalid input")
    model = await _open(caller, message.model)
    wanted = wire.EmbeddingRequest(inputs=[*message.input], dimensions=message.dimensions)
    embedded = await _embed(caller, model, EmbedRequest(model=message.model), wanted)
    assert embedded is not None
    vectors: Sequence[Any] = embedded.reply.embeddings
    if message.encoding_format == "base64":
        vectors = [base64.b64encode(struct.pack(f"<{len(v)}f", *v)).decode() for v in vectors]
    n_tokens = embedded.reply.prompt_eval_count
    body = {
        "object": "list",
        "data": [{"object": "embedding", "embedding": vector, "index": i} for i, vector in enumerate(vectors)],
        "model": message.model,
        "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
    }
    return await _respond(body, embedded)


async def _open(caller: Caller, name: str) -> StoredModel:
    try:
        return await caller.open(name)
    except NotFound as error:
        if not name:
            raise
        raise NotFound(f'model "{name}" not found, try pulling it first') from error


async def _embed(
    caller: Caller, model: StoredModel, message: EmbedRequest | EmbeddingsRequest, wanted: wire.EmbeddingRequest
) -> Embedded | None:
    """None without inputs: then the model is only loaded.

    Errors: what loading raises; HTTPException 501 for a model that is made for something else; BadRequest; RunnerDied.
    """
    if wanted.inputs and "embedding" not in model.capabilities:
        raise HTTPException(501, _UNSUPPORTED)
    options = model_options.merge(model.parameters, message.options)
    load = wanted_load(options, caller.settings, n_ctx_train=model.context_length or None, adapters=model.adapter_paths)
    async with caller.scheduler.acquire(model, load, message.keep_alive) as loaded:
        load_ns = time.monotonic_ns() - caller.began_ns
        if not wanted.inputs:
            return None
        try:
            reply = await loaded.runner.embed(wanted)
        except UnsupportedModel as error:
            raise HTTPException(501, str(error)) from error
    return Embedded(reply, load_ns, time.monotonic_ns() - caller.began_ns)


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
