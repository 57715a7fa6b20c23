"""Vectors and scores of texts, from the runner of a model that has a place."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import msgspec
from starlette.exceptions import HTTPException

from puna import wire
from puna.errors import UnsupportedModel
from puna.server.checking.embedding import CheckedEmbedding
from puna.server.placing.loaded import Place

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Embedded:
    """Vectors in the order of the inputs, with durations in nanoseconds from the request's beginning."""

    reply: wire.EmbeddingReply
    load_ns: int
    total_ns: int
    warnings: list[str]  # what of the request has no effect


async def embed(place: Place, request: CheckedEmbedding) -> Embedded:
    """Errors: HTTPException 501 for a model that is made for something else; BadRequest; RunnerDied."""
    try:
        reply = await place.runner.embed(msgspec.structs.replace(request.texts, n_ctx=place.n_ctx, salt=request.caller.salt))
    except UnsupportedModel as error:
        raise HTTPException(501, str(error)) from error
    if reply.truncated_count:
        log.warning(
            "inputs were longer than the context of %d tokens: %d tokens were left out", place.n_ctx, reply.truncated_count
        )
    return Embedded(reply, place.load_ns, time.monotonic_ns() - request.caller.began_ns, request.warnings)
