"""``POST /v1/embeddings``. Source: Ollama's OpenAI compatibility."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from puna.api.embed import OpenAIEmbeddingsRequest
from puna.errors import BadRequest
from puna.server.apis.openai.usage import prompt_usage
from puna.server.apis.vectors import respond, texts_of, warnings_of
from puna.server.checking.request import EmbeddingRequest
from puna.server.http.bodies import read_json
from puna.server.http.caller import Caller
from puna.server.pipeline import Pipeline


async def embeddings(request: Request) -> Response:
    caller = Caller.of(request)
    message = await read_json(request, OpenAIEmbeddingsRequest)
    if not message.input:
        raise BadRequest("invalid input")
    texts = texts_of(message.input, dimensions=message.dimensions)
    embedded = await Pipeline.of(request).embed(EmbeddingRequest(caller, message.model, texts, unused=message.unused))
    assert embedded is not None, "there are inputs"
    vectors: Sequence[Any] = embedded.reply.embeddings
    if message.encoding_format == "base64":
        vectors = [base64.b64encode(struct.pack(f"<{len(v)}f", *v)).decode() for v in vectors]
    body = {
        "object": "list",
        "data": [{"object": "embedding", "embedding": vector, "index": i} for i, vector in enumerate(vectors)],
        "model": message.model,
        "usage": prompt_usage(embedded.reply),
        **warnings_of(embedded),
    }
    return await respond(body, embedded)


routes = [Route("/v1/embeddings", embeddings, methods=["POST"])]
