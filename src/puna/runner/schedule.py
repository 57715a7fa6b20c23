"""Which tokens the next step computes: a pure decision over counters.

There is no prefill and no decode mode. Each request has tokens it wants computed and tokens that are; a request that
decodes is one token behind, a new prompt is far behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# While others decode, a long prompt advances by at most this many tokens per step: it bounds how long they wait.
MIXED_TOKENS = 128


@dataclass(frozen=True)
class Progress:
    """One request as the scheduler sees it."""

    n_computed: int
    n_wanted: int
    n_stop: int = 0  # a step should not go beyond so many tokens; 0: it may

    @property
    def n_behind(self) -> int:
        return self.n_wanted - self.n_computed


def schedule(requests: Sequence[Progress], n_batch: int) -> list[int]:
    """Tokens to compute for each request, in the same order; at most n_batch together, 0 for who must wait.

    Requests that are one token behind come first: they cost little, and someone reads their text as it appears. What
    remains goes to the others in the order given, which is the order of arrival, so that nobody is passed over for
    ever. With only decoding or only prompts the whole batch is theirs.
    """
    counts = [0] * len(requests)
    left = n_batch
    for i, request in enumerate(requests):
        if request.n_behind == 1 and left:
            counts[i] = 1
            left -= 1
    if any(counts):
        left = min(left, MIXED_TOKENS)
    for i, request in enumerate(requests):
        if request.n_behind > 1 and left:
            counts[i] = min(request.n_behind, left)
            if request.n_stop > request.n_computed:
                counts[i] = min(counts[i], request.n_stop - request.n_computed)
            left -= counts[i]
    return counts
