"""Requests that wait: none is lost between who puts them and who closes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tests.patience import PATIENCE_S

from puna.runner.scheduling.queue import Queue
from puna.runner.service import NotLoaded


class Request:
    is_cancelled = False

    def finish(self, reason: str) -> None: ...
    def fail(self, error: BaseException, status: int = 500) -> None: ...


def opened() -> Queue[Any]:
    queue: Queue[Any] = Queue()
    queue.open()
    return queue


def test_nothing_is_put_where_nobody_takes() -> None:
    queue: Queue[Any] = Queue()
    with pytest.raises(NotLoaded):
        queue.put(Request())
    queue.open()
    queue.put(Request())
    queue.close()
    with pytest.raises(NotLoaded):
        queue.put(Request())
    assert len(queue.take_all()) == 1
    assert not queue


def test_those_that_were_cancelled_are_taken_out_and_the_others_keep_their_order() -> None:
    queue, requests = opened(), [Request() for _ in range(5)]
    for request in requests:
        queue.put(request)
    requests[1].is_cancelled = requests[4].is_cancelled = True
    assert queue.take_cancelled() == [requests[1], requests[4]]
    assert queue.first(2) == [requests[0], requests[2]]
    assert queue.take(lambda waiting: waiting.pop()) is requests[3]
    assert queue.take_all() == [requests[0], requests[2]]


@pytest.mark.parametrize(("closes", "expected"), [(False, True), (True, False)])
def test_who_waits_is_woken_by_a_request_and_by_the_end(closes: bool, expected: bool) -> None:
    queue = opened()
    found: list[bool] = []
    waiter = threading.Thread(target=lambda: found.append(queue.wait(lambda: False)))
    waiter.start()
    queue.close() if closes else queue.put(Request())
    waiter.join(PATIENCE_S)
    assert found == [expected]


def test_nobody_waits_who_has_something_to_do() -> None:
    queue = opened()
    assert queue.wait(lambda: True)
    queue.close()
    assert not queue.wait(lambda: True)


def test_every_request_that_was_taken_is_there_at_the_end() -> None:
    queue = opened()
    n_put = [0] * 4

    def put(who: int) -> None:
        try:
            while True:
                queue.put(Request())
                n_put[who] += 1
        except NotLoaded:
            return

    threads = [threading.Thread(target=put, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    n_taken = 0
    while n_taken < 500:
        n_taken += len(queue.take_all())
    queue.close()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert n_taken + len(queue.take_all()) == sum(n_put)
