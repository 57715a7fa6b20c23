"""Which tokens the next step computes: a pure decision over counters.

There is no prefill and no decode mode. Each request has tokens it wants computed and tokens that are; a request that
decodes is one token behind, a new prompt is far behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from puna.runner.groups import Group, whole

# While others decode, a long prompt advances by at most this many tokens per step: it bounds how long they wait.
MIXED_TOKENS = 128


class Progress(NamedTuple):
    """One request as the scheduler sees it."""

    n_computed: int
    n_wanted: int
    n_stop: int = 0  # a step should not go beyond so many tokens; 0: it may
    groups: Sequence[Group] = ()  # each is computed in one step; none is larger than a batch

    @property
    def n_behind(self) -> int:
        return self.n_wanted - self.n_computed


def schedule(requests: Sequence[Progress], n_batch: int) -> list[int]:
    """Tokens to compute for each request, in the same order; at most n_batch together, 0 for who must wait.

    Requests that are one token behind come first: they cost little, and someone reads their text as it appears. What
    remains goes to the others in the order given, which is the order of arrival, so that nobody is passed over for
    ever. With only decoding or only prompts the whole batch is theirs. A group of tokens that must stay together may be
    larger than a prompt's share of a step; if it is the oldest's turn and there is no room beside those who decode, some
    of them wait for one step.
    """
    counts = [0] * len(requests)
    prompts = [i for i, request in enumerate(requests) if request.n_behind > 1]
    left = n_batch
    if prompts:
        left -= _first_group(requests[prompts[0]])
    for i, request in enumerate(requests):
        if request.n_behind == 1 and left > 0:
            counts[i] = 1
            left -= 1
    room = n_batch - sum(counts)
    share = min(room, MIXED_TOKENS) if any(counts) else room
    for i in prompts:
        counts[i] = _advance(requests[i], share, room)
        room -= counts[i]
        share = max(share - counts[i], 0)
    return counts


def _first_group(request: Progress) -> int:
    """Tokens of the group that the request is at."""
    return next((last - first for first, last in request.groups if first == request.n_computed), 0)


def _advance(request: Progress, share: int, room: int) -> int:
    """Tokens of a prompt to compute: its share, and more only to finish a group."""
    begin = request.n_computed
    end = begin + min(request.n_behind, share)
    if request.n_stop > begin:
        end = min(end, request.n_stop)
    return whole(begin, end, begin + room, request.groups) - begin if share else 0
