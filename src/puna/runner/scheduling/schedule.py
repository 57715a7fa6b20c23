"""Which tokens the next step computes: a pure decision over counters.

There is no prefill and no decode mode. Each request has tokens that are known and tokens that are computed; a request that
decodes is one token behind, a new prompt is far behind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from puna.runner.pacing.pace import UNBOUNDED, Pace, Prices, work
from puna.runner.prefixes.groups import Group, whole

# This part of what prompts get in a step goes to the oldest of them, the rest to those that lack least. So short prompts
# overtake long ones, and none waits longer than four times what it and the older ones take.
OLDEST_PART = 0.25

# Where time is short the oldest prompt still advances by so many tokens, and all together by so many.
LEAST_FOR_OLDEST, LEAST_TOKENS = 4, 16


class Progress(NamedTuple):
    """One request as the scheduler sees it."""

    n_computed: int
    n_tokens: int  # that are known
    n_checkpoint: int = 0  # a step should end after so many tokens, not go beyond; 0: it may
    groups: Sequence[Group] = ()  # each is computed in one step; none is larger than a batch

    @property
    def n_behind(self) -> int:
        return self.n_tokens - self.n_computed


def schedule(requests: Sequence[Progress], n_batch: int, pace: Pace = UNBOUNDED) -> list[int]:
    """Tokens to compute for each request, in the same order; at most n_batch together, 0 for who must wait.

    Requests that are one token behind come first, except that prompts keep a quarter of the rows: they cost little, and
    someone reads their text as it appears. What remains goes to the others, as much as the pace allows while there are such
    readers, else all of it: a quarter to the first in the order given, which is the order of arrival, the rest to whoever
    lacks least. A group of tokens that must stay together may be larger than a prompt's share of a step; if it is the
    oldest's turn and there is no room beside those who decode, some of them wait for one step.
    """
    counts = [0] * len(requests)
    prompts = [i for i, request in enumerate(requests) if request.n_behind > 1]
    left = n_batch
    if prompts:
        n_behind = sum(requests[i].n_behind for i in prompts)
        left -= max(_first_group(requests[prompts[0]]), min(n_behind, _kept_rows(n_batch)))
    for i, request in enumerate(requests):
        if request.n_behind == 1 and left > 0:
            counts[i] = 1
            left -= 1
    if prompts:
        room = n_batch - sum(counts)
        decoding = work((request.n_computed, n) for request, n in zip(requests, counts, strict=True) if n)
        seconds = pace.seconds_for_prompts(decoding) if decoding.decoded else math.inf
        tokens = min(room, pace.most_tokens) if decoding.decoded else room
        _share([requests[i] for i in prompts], prompts, counts, _Budget(sum(counts), room, tokens, seconds, pace.prices))
    return counts


@dataclass
class _Budget:
    """What prompts may still get in a step."""

    n_rows: int  # of the step so far
    room: int  # for more rows; only a group may take more of them than there are tokens
    tokens: int
    seconds: float
    prices: Prices

    def tokens_for(self, begin: int, n_most: int, part: float, least: int) -> int:
        """Of so many tokens of a prompt, those that this part of the budget pays, and *least* whatever they cost."""
        most = min(n_most, max(math.ceil(self.tokens * part), min(least, self.tokens)))
        paid = self.prices.tokens_for(self.seconds * part, begin, most)
        return max(paid if paid == most else _rounded(self.n_rows + paid) - self.n_rows, min(least, most))

    def spend(self, begin: int, count: int) -> None:
        self.n_rows += count
        self.room -= count
        self.tokens -= count
        self.seconds -= self.prices.of_prompt(begin, count)


def _share(prompts: Sequence[Progress], places: Sequence[int], counts: list[int], budget: _Budget) -> None:
    """Add to the counts at these places what each of the prompts, oldest first, gets of the budget."""
    before = budget.tokens
    if len(prompts) > 1:
        _give(prompts[0], places[0], counts, budget, OLDEST_PART, LEAST_FOR_OLDEST)
    for i in sorted(range(len(prompts)), key=lambda i: (prompts[i].n_behind, i)):
        least = LEAST_TOKENS - (before - budget.tokens)
        _give(prompts[i], places[i], counts, budget, 1.0, max(least, 0))


def _give(prompt: Progress, place: int, counts: list[int], budget: _Budget, part: float, least: int) -> None:
    """The part of the budget that a prompt can use, and more only to finish a group."""
    begin = prompt.n_computed + counts[place]
    end = prompt.n_tokens
    if prompt.n_checkpoint > prompt.n_computed:
        end = min(end, prompt.n_checkpoint)
    paid = budget.tokens_for(begin, end - begin, part, least) if budget.tokens > 0 and end > begin else 0
    if paid:
        count = whole(begin, begin + paid, begin + budget.room, prompt.groups) - begin
        counts[place] += count
        budget.spend(begin, count)


def _kept_rows(n_batch: int) -> int:
    """For prompts, however many decode; a batch of one row is too small to be shared."""
    return max(n_batch // 4, 1) if n_batch > 1 else 0


def _first_group(request: Progress) -> int:
    """Tokens of the group that the request is at."""
    return next((last - first for first, last in request.groups if first == request.n_computed), 0)


def _rounded(n: int) -> int:
    """Down to one of four numbers between two powers of two: steps of equal size share a graph, and prices tremble.

    Kernels take rows in fours and eights as well.
    """
    unit = 1 << max(n.bit_length() - 3, 0)
    return n // unit * unit
