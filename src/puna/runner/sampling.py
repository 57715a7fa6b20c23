"""From a step's logits to the next token of each request: grammars before, logarithms of probabilities after.

Knows requests and rows of logits; not how the logits were computed, nor what becomes of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from puna.runner.request import Request
from puna.sample.logprobs import top_logprobs
from puna.sample.matcher import GrammarError, masked, start_masks
from puna.sample.sampler import SampleError, sample_batch
from puna.sample.transforms import Floats
from puna.wire import TokenLogprob


def sample(logits: Floats, requests: Sequence[Request]) -> None:
    """Give each request its next token, or the error that ends it; then begin to compute what grammars allow next.

    Shapes: logits [n_rows, n_vocab], row i for requests[i]; rows beyond the requests are nobody's. They are not changed.
    """
    rows: list[Floats] = []
    ready: list[tuple[Request, Floats]] = []  # with its row as the model gave it
    for request, row in zip(requests, logits, strict=False):
        try:
            rows.append(row if request.matcher is None else masked(row, request.matcher.allowed()))
            ready.append((request, row))
        except GrammarError as error:
            request.fail(error, status=400)
    tokens = sample_batch(rows, [request.sampler for request, _ in ready])
    for (request, row), token in zip(ready, tokens, strict=True):
        if isinstance(token, SampleError):
            request.fail(token)
        elif not request.is_cancelled:
            request.accept(token, _logprob(request, row, token) if request.wire.logprobs else None)
    constrained = [r.matcher for r in requests if r.matcher is not None and not r.is_done]
    if constrained:
        start_masks(constrained)


def _logprob(request: Request, row: Floats, token: int) -> TokenLogprob:
    own, top = top_logprobs(row, token, request.wire.top_logprobs)
    return TokenLogprob(
        text=request.text_of(token),
        logprob=own,
        top=[TokenLogprob(text=request.text_of(other), logprob=logprob) for other, logprob in top],
    )
