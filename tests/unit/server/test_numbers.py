from __future__ import annotations

import re

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.registry import Collector

from puna.server.exposition import _Counted
from puna.server.metrics import Metrics
from puna.server.numbers import Number, Spread
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
