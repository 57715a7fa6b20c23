from __future__ import annotations

from puna.cluster.routing.demand import Change, Demand, Load, fits_without, to_drain


def loads(*n_running: int) -> list[Load]:
    return [Load(f"n{number}", n, 4) for number, n in enumerate(n_running)]


def test_one_more_is_started_when_requests_wait_everywhere_and_go_on_waiting() -> None:
    demand = Demand(start_after_s=2.0)
    assert demand.judge(loads(5), 0.0) is Change.NONE
    assert demand.judge(loads(6), 1.9) is Change.NONE
    assert demand.judge(loads(6), 2.0) is Change.START
    assert demand.judge(loads(6), 2.1) is Change.NONE  # the one that was started needs its time
    assert demand.judge(loads(6), 4.2) is Change.START


def test_a_short_queue_or_a_free_place_elsewhere_starts_nothing() -> None:
    demand = Demand(start_after_s=2.0)
    for second in range(10):
        assert demand.judge(loads(9) if second % 2 else loads(4), float(second)) is Change.NONE
        assert demand.judge(loads(9, 4), second + 0.5) is Change.NONE
    assert demand.judge([], 99.0) is Change.NONE


def test_one_of_several_is_drained_when_the_others_have_long_been_enough() -> None:
    demand = Demand(drain_after_s=60.0)
    assert demand.judge(loads(1, 1), 0.0) is Change.NONE
    assert demand.judge(loads(3, 1), 50.0) is Change.NONE  # busy again
    assert demand.judge(loads(1, 0), 60.0) is Change.NONE
    assert demand.judge(loads(1, 0), 120.0) is Change.DRAIN
    assert Demand().judge(loads(0), 1e9) is Change.NONE  # the last one goes when its time is over, as everywhere


def test_the_one_with_least_to_do_is_drained() -> None:
    assert to_drain(loads(3, 0, 2)) == "n1"
    assert fits_without(loads(2, 0, 2), "n1")
    assert not fits_without(loads(3, 0, 2), "n1")
