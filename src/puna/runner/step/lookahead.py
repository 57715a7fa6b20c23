"""The step after the one that is about to be computed, if nobody comes, goes or ends: good enough to build its graph for."""

from __future__ import annotations

from collections.abc import Sequence

from puna.kvcache.batch import Batch, batch
from puna.runner.scheduling.pace import UNBOUNDED, Pace
from puna.runner.scheduling.schedule import Progress, schedule
from puna.runner.tasks.completion import Request


def next_batch(chosen: Sequence[tuple[Request, int]], n_batch: int, pace: Pace = UNBOUNDED) -> Batch:
    """*chosen* is the step at hand, requests with the number of their tokens in it; the result has 0 for every token."""
    ends = [request.n_computed + count for request, count in chosen]
    # Whoever has all tokens computed gets one more.
    wanted = [max(len(request.tokens), end + 1) for (request, _), end in zip(chosen, ends, strict=True)]
    progress = [
        Progress(end, n_wanted, groups=request.groups) for (request, _), end, n_wanted in zip(chosen, ends, wanted, strict=True)
    ]
    positions: list[int] = []
    sequences: list[int] = []
    outputs: list[int] = []  # the last of each request, as the engine asks for them
    for (request, _), end, count in zip(chosen, ends, schedule(progress, n_batch, pace), strict=True):
        positions += range(end, end + count)
        sequences += [request.slot] * count
        if count:
            outputs.append(len(positions) - 1)
    return batch([0] * len(positions), positions, sequences, outputs)
