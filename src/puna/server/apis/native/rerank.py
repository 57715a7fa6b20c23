"""``POST /api/rerank`` and ``POST /v1/rerank``: which of some texts answers a query best.

Scores are mostly logits, sent as probabilities unless the client wants them raw.

Source: Jina's and Cohere's rerank APIs.
"""

from __future__ import annotations

import math
import secrets
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from puna import wire
from puna.api.rerank import RerankRequest
from puna.server.answering.embedding import Embedded, open_model, vectors_of
from puna.server.checking.check import Caller
from puna.server.http.bodies import checked, json_response, read_json


async def native_rerank(request: Request) -> Response:
    message, found = await _ranked(request)
    counts: dict[str, Any] = {
        "total_duration": found.total_ns,
        "load_duration": found.load_ns,
        "prompt_eval_count": found.reply.prompt_eval_count,
    }
    if found.reply.truncated_count:
        counts["truncated_count"] = found.reply.truncated_count
    if found.warnings:
        counts["warnings"] = found.warnings
    return json_response({"model": message.model, "results": _results(message, found.reply), **counts})


async def openai_rerank(request: Request) -> Response:
    message, found = await _ranked(request)
    n_tokens = found.reply.prompt_eval_count
    usage: dict[str, Any] = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    if found.reply.truncated_count:
        usage["prompt_tokens_details"] = {"truncated_tokens": found.reply.truncated_count}
    body = {
        "id": f"rerank-{secrets.token_hex(12)}",
        "object": "list",
        "model": message.model,
        "results": _results(message, found.reply),
        "usage": usage,
        **({"warnings": found.warnings} if found.warnings else {}),
    }
    return json_response(body)


async def _ranked(request: Request) -> tuple[RerankRequest, Embedded]:
    caller = Caller.of(request)
    message = await read_json(request, RerankRequest)
    await checked(request, message.check)
    model = await open_model(caller, message.model)
    wanted = wire.EmbeddingRequest(inputs=[*message.documents], truncate=message.truncate, query=message.query)
    found = await vectors_of(caller, model, message, wanted, message.unused)
    assert found is not None, "there are documents"
    return message, found


def _results(message: RerankRequest, reply: wire.EmbeddingReply) -> list[dict[str, Any]]:
    """The best first; of texts with the same score in the order in which they came."""
    scores = [labels[0] for labels in reply.embeddings]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: message.top_n]
    results: list[dict[str, Any]] = []
    for index in order:
        score = scores[index] if message.raw_scores or reply.has_probabilities else probability(scores[index])
        result: dict[str, Any] = {"index": index, "relevance_score": score}
        if message.return_documents:
            result["document"] = {"text": message.documents[index]}
        results.append(result)
    return results


def probability(logit: float) -> float:
    """The logistic function, from whichever side does not overflow."""
    if logit >= 0:
        return 1 / (1 + math.exp(-logit))
    power = math.exp(logit)
    return power / (1 + power)


routes = [
    Route("/api/rerank", native_rerank, methods=["POST"]),
    Route("/v1/rerank", openai_rerank, methods=["POST"]),
]
