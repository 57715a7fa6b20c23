"""From a step's logits to the next token of each request.

Knows requests and rows of logits; not how the logits were computed, nor what becomes of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from puna.runner.request import Request
from puna.sample.sampler import SampleError, sample_batch
from puna.sample.transforms import Floats


def sample(logits: Floats, requests: Sequence[Request]) -> None:
    """Give each request its next token, or the error that ends it.

    Shapes: logits [n_rows, n_vocab], row i for requests[i]; rows beyond the requests are nobody's.
    """
    for request, token in zip(requests, sample_batch(logits[: len(requests)], [r.sampler for r in requests]), strict=True):
        if isinstance(token, SampleError):
            request.fail(token)
        elif not request.is_cancelled:
            request.accept(token)
