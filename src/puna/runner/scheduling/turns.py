"""Whose turn it is where a batch has no more rows than there are requests that decode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from puna.runner.scheduling.schedule import Progress

# This part of the rows is for prompts, if there are any.
PROMPT_PART = 4


class Waiter(Protocol):
    last_turn: int

    @property
    def progress(self) -> Progress: ...


T = TypeVar("T", bound=Waiter)


class Turns:
    """Counts turns over all requests, so that it is known who has waited longest."""

    def __init__(self) -> None:
        self._n = 0

    def order(self, tasks: Sequence[T], n_batch: int) -> Sequence[T]:
        """The tasks that the next step should look at: of those that decode, who has waited longest; all prompts, as they were.

        A batch of a single row goes to whoever has waited longest, a prompt or not.
        """
        if n_batch == 1:
            return sorted(tasks, key=_last_turn)[:1]
        decoding = [task for task in tasks if task.progress.n_behind == 1]
        if len(decoding) < n_batch:
            return tasks
        prompts = [task for task in tasks if task.progress.n_behind != 1]
        n_rows = n_batch - max(n_batch // PROMPT_PART, 1) if prompts else n_batch
        return [*sorted(decoding, key=_last_turn)[:n_rows], *prompts]

    def note(self, tasks: Sequence[Waiter]) -> None:
        """These have had their turn; of those in one step the one that waited longest is before the others next time, too."""
        for task in sorted(tasks, key=_last_turn):
            self._n += 1
            task.last_turn = self._n


def _last_turn(task: Waiter) -> int:
    return task.last_turn
