"""What the answers with vectors of all APIs have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from puna import wire
from puna.api import go_json
from puna.api.embed import Illustrated
from puna.server.answering.embedding import Embedded
from puna.server.http.errors import JSON_CONTENT_TYPE
from puna.server.http.replies import json_response
from puna.server.prompting.images import PlacedImages

_WRITE_ASIDE = 1 << 16  # numbers; writing more than that as JSON would keep other requests waiting


def texts_of(inputs: Sequence[str | Illustrated], **fields: Any) -> wire.EmbeddingRequest:
    """What a runner is asked to make vectors of. Errors: BadRequest for a text that has not a place for each of its images."""
    placed = PlacedImages()
    texts = [one if isinstance(one, str) else placed.in_input(one.prompt_string, one.multimodal_data) for one in inputs]
    return wire.EmbeddingRequest(inputs=[*texts], images=placed.images, **fields)


def warnings_of(embedded: Embedded) -> dict[str, list[str]]:
    return {"warnings": embedded.warnings} if embedded.warnings else {}


async def respond(body: dict[str, Any], embedded: Embedded) -> Response:
    vectors = embedded.reply.embeddings
    if len(vectors) * len(vectors[0]) <= _WRITE_ASIDE:
        return json_response(body)
    return Response(await asyncio.to_thread(go_json.dumps, body), media_type=JSON_CONTENT_TYPE)
