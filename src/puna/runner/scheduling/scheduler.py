"""Who runs, and which tokens the next step computes: from the queue to a plan, and back to free places.

Knows neither threads nor how anything is computed. One thread, the engine's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Generic, NamedTuple

from puna.kvcache.cache import Limits, Sequences, resume_point
from puna.runner.images.in_sequence import looked_at_next
from puna.runner.images.storing import Storing
from puna.runner.pacing.pace import UNBOUNDED, Pace, work
from puna.runner.pacing.step_times import StepTimes
from puna.runner.prefixes.slots import Slots
from puna.runner.scheduling.admission import QUEUE_WINDOW, Answers, Room, make_room, resume_paused
from puna.runner.scheduling.checkpoints import to_next_checkpoint
from puna.runner.scheduling.packing import PACKED_TOKENS, schedule_whole
from puna.runner.scheduling.queue import Queue
from puna.runner.scheduling.schedule import schedule
from puna.runner.scheduling.shift import shift
from puna.runner.scheduling.task import Part, T, W
from puna.runner.scheduling.turns import Turns
from puna.runner.scheduling.workload import Workload


class Plan(NamedTuple, Generic[T]):
    """What a step computes, and how long it should take."""

    tasks: Sequence[T]
    parts: Sequence[Part[T]]  # one of each task, in the order of their sequences
    n_tokens: int
    pace: Pace


class Scheduler(Generic[W, T]):
    """``running`` are those that have a place, with those that gave way."""

    def __init__(
        self,
        workload: Workload[W, T],
        cache: Sequences,
        slots: Slots,
        limits: Limits,
        token_gap_s: float = math.inf,
        prompt_tail: int = 0,
        storing: Storing | None = None,
    ) -> None:
        """*token_gap_s*: how long readers may wait for a step; *prompt_tail*: as puna.kvcache.cache.StepEndCache has it, or 0."""
        self.running: list[T] = []
        self.slots = slots
        self._workload = workload
        self._cache = cache
        self._limits = limits
        self._prompt_tail = prompt_tail
        self._storing = storing
        self._times = StepTimes(token_gap_s)
        self._answers = Answers()
        self._turns = Turns()
        self._n_admitted = 0

    def admit(self, queue: Queue[W]) -> None:
        """Start those who wait, as long as there are places."""
        for request in queue.take_cancelled():
            request.finish("cancelled")
        # Room that comes free is for those who gave way, until none of them is left.
        while self.slots.n_free and queue and not any(task.is_paused for task in self.running):
            room = self._room()
            task = queue.take(partial(self._workload.start_next, running=self.running, room=room))
            if task is None:
                return
            self.running.append(task)
            self._place(task, room)

    def _room(self) -> Room:
        return Room(self._cache, self.slots, self._answers, self.running)

    def _place(self, task: T, room: Room) -> None:
        self._n_admitted += 1
        task.order = self._n_admitted
        if task.reuses_prefixes:
            n_needed = room.n_promised(task) + room.n_needed(task, len(task.tokens))
            task.place(*self.slots.acquire(task.tokens, task.groups, n_needed))
        else:
            task.place(*self.slots.acquire(task.tokens[:1]))  # a prefix of one token is never reused

    def plan(self, queue: Queue[W]) -> Plan[T] | None:
        """The next step; None where there is nothing to compute."""
        active: Sequence[T] = [task for task in self.running if self._goes_on(task)]
        if len(active) < len(self.running):
            self.retire()  # who has just ended leaves room to this step
        resume_paused(active, self._room(), self.slots)
        active = [task for task in active if not task.is_paused and self._sees_what_is_next(task)]
        active = self._turns.order(active, self._limits.n_batch)
        waiting = self._workload.prompts(queue.first(QUEUE_WINDOW))
        progress = [
            to_next_checkpoint(task, waiting, self._prompt_tail) if self._prompt_tail and task.reuses_prefixes else task.progress
            for task in active
        ]
        pace = self._times.pace if self._workload.streams and any(p.n_behind > 1 for p in progress) else UNBOUNDED
        if self._workload.takes_whole_texts:
            counts = schedule_whole(progress, PACKED_TOKENS)
        else:
            counts = schedule(progress, self._limits.n_batch, pace)
        # Rows of neighbouring sequences stand together, so that the cache can read them with one view.
        chosen = sorted(((task, n) for task, n in zip(active, counts, strict=True) if n), key=lambda pair: pair[0].slot)
        chosen = make_room(chosen, self.running, self._cache, self.slots, waiting)
        if not chosen:
            return None
        tasks = [task for task, _ in chosen]
        self._turns.note(tasks)
        return Plan(tasks, [Part(task, task.n_computed, n) for task, n in chosen], sum(n for _, n in chosen), pace)

    def _sees_what_is_next(self, task: T) -> bool:
        """Where its next token is an image that is looked at by cross attention, that is stored between steps, before its own."""
        images = looked_at_next(task.images, task.n_computed, task.n_looked_at)
        return not images or self._storing is None or self._storing.is_stored(task.slot, images)

    def _goes_on(self, task: T) -> bool:
        """Ends those who are cancelled; makes room in a full context. Who may not shift ends before it is full."""
        if task.is_cancelled:
            task.finish("cancelled")
        elif len(task.tokens) > task.n_ctx and not task.is_done:
            shift(task, self._cache, self.slots)
        return not task.is_done

    def note(self, plan: Plan[T], seconds: float) -> None:
        """The step was computed in this time."""
        if self._workload.streams:
            self._times.note(work((begin, n) for _, begin, n in plan.parts), seconds)

    def retire(self) -> None:
        """Give back the slots of tasks that ended; their computed tokens stay for the next with the same prefix."""
        for task in self.running:
            self.slots.record(task.slot, task.tokens, task.n_computed)
        for task in [task for task in self.running if task.is_done]:
            self._answers.note(task.n_generated)
            # An image that was to come may have taken the place of the one before.
            self._cache.remove(task.slot, resume_point(self._cache, task.slot, task.n_computed))
            self.slots.release(task.slot)
            self.running.remove(task)

    def take_all(self) -> list[T]:
        """Nobody runs any more; the slots still have what they had."""
        running, self.running = self.running, []
        return running
