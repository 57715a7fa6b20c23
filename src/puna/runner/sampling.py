"""From a step's logits to the next token of each request: what must and must not come, grammars, probabilities after.

Knows requests and rows of logits; not how the logits were computed, nor what becomes of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from puna.runner.request import Request
from puna.sample.logprobs import top_logprobs
from puna.sample.matcher import GrammarError, is_allowed, masked, start_masks
from puna.sample.sampler import SampleError, sample_batch
from puna.sample.transforms import Floats
from puna.wire import TokenLogprob


def sample(logits: Floats, requests: Sequence[Request]) -> None:
    """Give each request its next token, or the error that ends it; then begin to compute what grammars allow next.

    Shapes: logits [n_rows, n_vocab], row i for requests[i]; rows beyond the requests are nobody's. They are not changed.
    """
    rows: list[Floats] = []
    free: list[Request] = []
    ready: list[tuple[Request, Floats, int | SampleError]] = []  # with its row as the model gave it
    given: list[Floats] = []
    for request, row in zip(requests, logits, strict=False):
        try:
            allowed = None if request.matcher is None else request.matcher.allowed()
        except GrammarError as error:
            request.fail(error, status=400)
            continue
        forced = request.forced_token
        if forced is not None and (allowed is None or is_allowed(forced, allowed)):
            ready.append((request, row, forced))
            continue
        free.append(request)
        given.append(row)
        rows.append(row if allowed is None else masked(row, allowed))
    ready += zip(free, given, _choose(rows, free), strict=True)
    for request, row, token in ready:
        if isinstance(token, SampleError):
            request.fail(token)
        elif not request.is_cancelled:
            request.accept(token, _logprob(request, row, token) if request.wire.logprobs else None)
    constrained = [r.matcher for r in requests if r.matcher is not None and not r.is_done]
    if constrained:
        start_masks(constrained)


def _choose(rows: Sequence[Floats], requests: Sequence[Request]) -> list[int | SampleError]:
    """A token of each row that is not banned.

    Bans copy the row, and the greatest logit is seldom a banned token's: who is greedy gets them only then.
    """
    allowed = [row if r.sampler.is_greedy else without(row, r.banned_tokens) for row, r in zip(rows, requests, strict=True)]
    tokens = sample_batch(allowed, [request.sampler for request in requests])
    for i, request in enumerate(requests):
        if tokens[i] in request.banned_tokens:
            (tokens[i],) = sample_batch([without(rows[i], request.banned_tokens)], [request.sampler])
    return tokens


def without(row: Floats, banned: frozenset[int]) -> Floats:
    """A copy of the row in which the banned tokens have no chance; the row itself when there are none."""
    if not banned:
        return row
    result = row.copy()
    result[[token for token in banned if token < len(row)]] = -np.inf
    return result


def _logprob(request: Request, row: Floats, token: int) -> TokenLogprob:
    own, top = top_logprobs(row, token, request.wire.top_logprobs)
    return TokenLogprob(
        text=request.text_of(token),
        logprob=own,
        top=[TokenLogprob(text=request.text_of(other), logprob=logprob) for other, logprob in top],
    )
