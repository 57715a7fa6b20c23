"""The numbers of all nodes at one place, by node: what their replicas report, and what became of requests whose node was lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from puna.cluster.head.nodes import Nodes
from puna.cluster.head.replicas import Replica
from puna.cluster.head.table import ReplicaTable
from puna.cluster.messages import ReplicaReport
from puna.server.labels import FILE_LABEL

_REPLICA = ["model", "node"]


class Cluster(Protocol):
    nodes: Nodes
    models: ReplicaTable
    n_moved: Counter[str]
    n_broken: Counter[str]


class ClusterMetrics(Collector):
    def __init__(self, scheduler: Cluster) -> None:
        self._scheduler = scheduler

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._of_nodes()
        yield from self._of_replicas()
        moved = CounterMetricFamily(
            "puna_node_requests_moved", "Requests that went elsewhere before anything was streamed.", labels=["node"]
        )
        broken = CounterMetricFamily(
            "puna_node_requests_broken", "Requests that ended in the middle of their answer with the node.", labels=["node"]
        )
        for family, counts in ((moved, self._scheduler.n_moved), (broken, self._scheduler.n_broken)):
            for node, n in counts.items():
                family.add_metric([node], n)
            yield family

    def _of_nodes(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("puna_node_up", "Whether the machine's node answers: 1 or 0.", labels=["node"])
        free = GaugeMetricFamily("puna_node_memory_free_bytes", "Memory that models may still take there.", labels=["node"])
        for node in self._scheduler.nodes.values():
            up.add_metric([node.name], 1 if node.is_usable else 0)
            if node.report is not None:
                free.add_metric([node.name], node.report.free)
        yield up
        yield free

    def _of_replicas(self) -> Iterator[Metric]:
        for name, text, value in _GAUGES:
            sums: Counter[tuple[str, str]] = Counter()
            for replica in self._scheduler.models.replicas():
                if replica.reported is not None:
                    sums[self._label(replica.reported), replica.node.name] += value(replica)
            yield _filled(GaugeMetricFamily(name, text, labels=_REPLICA), sums)
        for name, text, field in _COUNTERS:
            nodes = self._scheduler.nodes.values()
            counted = {(label, node.name): n for node in nodes for label, n in node.totals.sums[field].items()}
            yield _filled(CounterMetricFamily(name, text, labels=_REPLICA), counted)

    def _label(self, reported: ReplicaReport) -> str:
        return self._scheduler.models.labels.named(reported.name) if reported.digest else FILE_LABEL


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[tuple[str, str], int]) -> Metric:
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


def _of_health(field: str) -> Callable[[Replica], int]:
    def value(replica: Replica) -> int:
        health = replica.reported and replica.reported.health
        return int(getattr(health, field)) if health else 0

    return value


_GAUGES: list[tuple[str, str, Callable[[Replica], int]]] = [
    ("puna_replica_requests", "Requests of all heads that are on a replica.", lambda replica: replica.n_busy),
    ("puna_replica_requests_waiting", "Those of them that wait in its runner.", _of_health("waiting")),
    ("puna_replica_cache_cells_used", "Cells of its cache that hold a token.", _of_health("cache_used")),
    ("puna_replica_prefix_keys", "Blocks of prompts that it is believed to hold.", lambda replica: len(replica.keys)),
]
_COUNTERS = [
    ("puna_replica_tokens", "Tokens computed there, of prompts and answers, also by replicas that have ended.", "tokens"),
    ("puna_replica_steps", "Steps computed there, also by replicas that have ended.", "steps"),
]
