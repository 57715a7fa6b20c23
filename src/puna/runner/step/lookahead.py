"""The step after the one that is about to be computed, if nobody comes, goes or ends: good enough to build its graph for."""

from __future__ import annotations

from collections.abc import Sequence

from puna.runner.images.in_sequence import looked_at_next
from puna.runner.pacing.pace import Pace
from puna.runner.scheduling.schedule import Progress, schedule
from puna.runner.scheduling.task import Part, Task
from puna.runner.step.compute import collect
from puna.runner.step.forward import Compute, Forward


def look_ahead(forward: Compute, parts: Sequence[Part[Task]], n_batch: int, pace: Pace) -> None:
    """Have the graph of the next step built while this one is computed, where that is done at all."""
    if isinstance(forward, Forward) and forward.builds_ahead:
        forward.expect(collect(next_parts(parts, n_batch, pace)).batch)


def next_parts(parts: Sequence[Part[Task]], n_batch: int, pace: Pace) -> list[Part[Task]]:
    """The parts of the next step; of tokens that are not known yet as well."""
    progress = [Progress(part.end, _n_ready(part), groups=part.task.groups) for part in parts]
    counts = schedule(progress, n_batch, pace)
    return [Part(part.task, part.end, n) for part, n in zip(parts, counts, strict=True) if n]


def _n_ready(part: Part[Task]) -> int:
    """Whoever has all tokens computed gets one more; whoever comes to an image that is looked at waits until that is stored."""
    if looked_at_next(part.task.images, part.end, part.task.n_looked_at):
        return part.end
    return part.end + 1 if part.end >= len(part.task.tokens) else part.task.n_ready(part.end)
