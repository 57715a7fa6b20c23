"""Which of some texts answers a query best: read and judged alike for all APIs.

Scores are mostly logits, sent as probabilities unless the client wants them raw.

Source: Jina's and Cohere's rerank APIs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from puna import wire
from puna.api.rerank import RerankRequest
from puna.server.answering.embedding import Embedded
from puna.server.checking.request import EmbeddingRequest
from puna.server.http.bodies import checked, read_json
from puna.server.http.caller import Caller
from puna.server.pipeline import Pipeline


async def ranked(request: Request) -> tuple[RerankRequest, Embedded]:
    caller = Caller.of(request)
    message = await read_json(request, RerankRequest)
    await checked(request, message.check)
    texts = wire.EmbeddingRequest(inputs=[*message.documents], truncate=message.truncate, query=message.query)
    embedding_request = EmbeddingRequest(caller, message.model, texts, message.options, message.keep_alive, message.unused)
    found = await Pipeline.of(request).embed(embedding_request)
    assert found is not None, "there are documents"
    return message, found


def results(message: RerankRequest, reply: wire.EmbeddingReply) -> list[dict[str, Any]]:
    """The best first; of texts with the same score in the order in which they came."""
    scores = [labels[0] for labels in reply.embeddings]
    shown = scores if message.raw_scores else probabilities(reply)
    found: list[dict[str, Any]] = []
    for index in best_first(scores, message.top_n):
        result: dict[str, Any] = {"index": index, "relevance_score": shown[index]}
        if message.return_documents:
            result["document"] = {"text": message.documents[index]}
        found.append(result)
    return found


def best_first(scores: Sequence[float], n: int | None = None) -> list[int]:
    """The places of the *n* best, or of all; of scores that are the same in their order."""
    return sorted(range(len(scores)), key=lambda index: -scores[index])[:n]


def probabilities(reply: wire.EmbeddingReply) -> list[float]:
    """The scores of a reply, from 0 to 1."""
    scores = [labels[0] for labels in reply.embeddings]
    return scores if reply.has_probabilities else [probability(score) for score in scores]


def probability(logit: float) -> float:
    """The logistic function, from whichever side does not overflow."""
    if logit >= 0:
        return 1 / (1 + math.exp(-logit))
    power = math.exp(logit)
    return power / (1 + power)
