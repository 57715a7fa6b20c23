"""Texts that must be computed in one step as a whole: how many of them share it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from puna.runner.scheduling.schedule import Progress
from puna.runner.scheduling.task import Task

# Texts share a batch up to this many tokens. More would only make attention, which is over the whole batch, dearer.
PACKED_TOKENS = 512

# Of an encoder; a place costs nothing there, since nothing is cached.
MAX_TEXTS = 128


def fills_no_batch(running: Iterable[Task]) -> bool:
    """Whether another text would have a use: one that is taken up later leaves its turn to whoever comes meanwhile."""
    return sum(text.n_ready(text.n_computed) - text.n_computed for text in running) < PACKED_TOKENS


def schedule_whole(requests: Sequence[Progress], n_batch: int) -> list[int]:
    """As ``schedule``, for texts that must be in one batch as a whole: in order, whoever fits.

    The first has a step to itself if it is longer than a batch, so nobody is passed over for ever.
    """
    counts = [0] * len(requests)
    left = n_batch
    for i, request in enumerate(requests):
        if i == 0 or request.n_behind <= left:
            counts[i] = request.n_behind
            left = max(left - request.n_behind, 0)
    return counts
