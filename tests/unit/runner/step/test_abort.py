"""A step is broken off when nobody waits for it, and no step begins then."""

from __future__ import annotations

from typing import Any

from puna.runner.step.abort import CurrentStep


class Host:
    def __init__(self) -> None:
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True

    def clear_abort(self) -> None:
        self.is_aborted = False


class Cancellable:
    is_cancelled = False


def step_of(n_tasks: int) -> tuple[CurrentStep, Host, list[Any]]:
    host = Host()
    return CurrentStep(host), host, [Cancellable() for _ in range(n_tasks)]


def test_it_is_aborted_once_all_of_it_were_cancelled_and_the_next_one_is_not() -> None:
    step, host, tasks = step_of(2)
    assert step.begin(tasks)
    for task, is_aborted in zip(tasks, (False, True), strict=True):
        task.is_cancelled = True
        step.abort_unwanted()
        assert host.is_aborted == is_aborted
    step.end()
    assert not host.is_aborted
    assert step.begin([Cancellable()])  # type: ignore[list-item]


def test_a_cancellation_between_steps_breaks_nothing_off() -> None:
    step, host, tasks = step_of(1)
    tasks[0].is_cancelled = True
    step.abort_unwanted()
    assert not host.is_aborted
    assert not step.begin(tasks)
    assert not step.tasks
    step.abort_unwanted()
    assert not host.is_aborted


def test_after_the_last_none_begins_and_what_goes_on_ends() -> None:
    """Also the reading of weights, which is no step."""
    step, host, tasks = step_of(1)
    step.abort_last()
    assert host.is_aborted
    assert not step.begin(tasks)
