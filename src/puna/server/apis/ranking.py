"""Which of some texts answers a query best: read and judged alike for all APIs.

Scores are mostly logits, sent as probabilities unless the client wants them raw.

Source: Jina's and Cohere's rerank APIs.
"""

from __future__ import annotations

import math
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
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: message.top_n]
    found: list[dict[str, Any]] = []
    for index in order:
        score = scores[index] if message.raw_scores or reply.has_probabilities else probability(scores[index])
        result: dict[str, Any] = {"index": index, "relevance_score": score}
        if message.return_documents:
            result["document"] = {"text": message.documents[index]}
        found.append(result)
    return found


def probability(logit: float) -> float:
    """The logistic function, from whichever side does not overflow."""
    if logit >= 0:
        return 1 / (1 + math.exp(-logit))
    power = math.exp(logit)
    return power / (1 + power)
