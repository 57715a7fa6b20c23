"""Room in a context that is full: a task drops some of its tokens, and the cache follows."""

from __future__ import annotations

from collections.abc import Sequence

from puna.kvcache.cache import NotSupported, Sequences, resume_point
from puna.runner.prefixes.groups import Group, cut
from puna.runner.prefixes.slots import Slots
from puna.runner.scheduling.task import Task


def dropped(n_ctx: int, n_keep: int, groups: Sequence[Group]) -> Group:
    """Of a full context: half of what follows the kept tokens, in whole groups."""
    return cut(n_keep, n_keep + max((n_ctx - n_keep) // 2, 1), groups)


def shift(task: Task, cache: Sequences, slots: Slots) -> None:
    """Let the task drop what it must, and have what cannot be moved in the cache computed again."""
    begin, end, n_positions = task.shift()
    try:
        cache.remove(task.slot, begin, end, n_positions=n_positions)
        task.n_computed -= end - begin
    except NotSupported:
        task.n_computed = resume_point(cache, task.slot, begin)
        cache.remove(task.slot, task.n_computed)
    slots.replace(task.slot, task.tokens, task.n_computed)
