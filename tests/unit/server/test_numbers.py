from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.registry import Collector

from puna.server.exposition import _Counted
from puna.server.metrics import Metrics
from puna.server.numbers import Number, Spread, Totals
from puna.server.placing.table import LoadedModels


def test_a_count_grows_and_a_level_falls() -> None:
    number = Number("n", "", ("model",), is_level=True)
    number.add("a")
    number.add("a", amount=2.5)
    number.add("b", amount=-1)
    assert number.values == {("a",): 3.5, ("b",): -1}


@pytest.mark.parametrize("value", [-1.0, 0.0, 0.5, 0.50001, 1.0, 7.0])
def test_what_lies_at_a_bound_is_within_it(value: float) -> None:
    """As Prometheus' own histograms have it."""
    spread = Spread("puna_queue_seconds", "Wait for a place and for the model's load.", ("model",), (0.5, 1.0))
    spread.of("m").observe(value)
    metrics = Metrics(LoadedModels())
    metrics.spreads[:], metrics.numbers[:] = [spread], []
    theirs = Histogram(spread.name, spread.help, ["model"], buckets=spread.bounds, registry=(registry := CollectorRegistry()))
    theirs.labels("m").observe(value)
    assert lines(_Counted(metrics)) == [line for line in lines(registry) if "_created" not in line]


def lines(source: Collector | CollectorRegistry) -> list[str]:
    registry = source if isinstance(source, CollectorRegistry) else CollectorRegistry()
    if registry is not source:
        registry.register(source)
    return re.findall(r"^puna_queue_seconds.*$", generate_latest(registry).decode(), re.MULTILINE)


def test_what_has_ended_stays_in_the_sum_and_what_comes_after_adds_to_it() -> None:
    totals = Totals()
    for source, tokens in (("first", 5), ("first", 7), ("second", 1), ("second", 4)):
        totals.heard(source, "model", {"tokens": tokens})
    totals.heard("third", "another", {"tokens": 2})
    assert totals.sums["tokens"] == {"model": 11, "another": 2}


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 100))))
def test_in_whatever_order_and_however_often_it_is_told_a_sum_only_grows_and_each_counts_once(
    said: list[tuple[int, int]],
) -> None:
    totals, last = Totals(), 0
    for source, tokens in said:
        totals.heard(source, "model", {"tokens": tokens})
        assert totals.sums["tokens"]["model"] >= last
        last = totals.sums["tokens"]["model"]
    most = {source: max(tokens for one, tokens in said if one == source) for source, _ in said}
    assert last == sum(most.values())


def test_those_that_ended_long_ago_take_no_memory_and_one_that_lives_is_remembered() -> None:
    totals = Totals(max_sources=8)
    for number in range(1000):
        totals.heard(number, "model", {"tokens": 3})
        totals.heard("it lives", "model", {"tokens": 10 + number})
    assert len(totals._last) == 8
    assert totals.sums["tokens"]["model"] == 3 * 1000 + 10 + 999
