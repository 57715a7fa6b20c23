"""Where steps over a prompt should end, for caches that can resume a sequence only where a step ended."""

from __future__ import annotations

from collections.abc import Sequence

from puna.runner.prefixes.tree import common_prefix
from puna.runner.scheduling.schedule import Progress
from puna.runner.scheduling.task import Task

# A step costs time, so it should spare at least so many tokens.
MIN_STEP = 32


def to_next_checkpoint(task: Task, waiting: Sequence[list[int]], prompt_tail: int) -> Progress:
    """The task's progress, up to where prompts that wait depart from its own, or to *prompt_tail* before its prompt's end.

    Others wait for what they have in common with it (puna.runner.scheduling.admission), and copy it when the step has
    ended there.
    """
    if task.n_computed >= task.n_prompt:
        return task.progress
    departures = (common_prefix(other, task.tokens, min(len(other) - 1, task.n_prompt)) for other in waiting)
    checkpoints = [*departures, task.n_prompt - prompt_tail]
    nearest = min((n for n in checkpoints if n >= task.n_computed + MIN_STEP), default=0)
    return task.progress._replace(n_checkpoint=nearest)
