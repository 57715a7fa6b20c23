"""All models of all nodes, as `/api/ps`, `/api/engine` and the metrics show them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from puna import wire
from puna.cluster.head.description import key_of
from puna.cluster.head.nodes import Nodes
from puna.cluster.head.replicas import Node, Replica
from puna.cluster.messages import Ended, Model, ReplicaReport, Report
from puna.errors import NodeLost
from puna.server.labels import Labels
from puna.server.numbers import Totals
from puna.server.placing.loaded import Loadable, Running, State
from puna.store.models.model import StoredModel


@dataclass(frozen=True)
class Known:
    """A model that this head was asked for."""

    loadable: Loadable
    model: Model


@dataclass(frozen=True)
class Probe:
    """How a replica is. Its node tells that unasked, but for what takes long to tell."""

    replica: Replica

    @property
    def run(self) -> str:
        return self.replica.reported.run if self.replica.reported else ""

    async def health(self) -> wire.Health:
        health = self.replica.reported.health if self.replica.reported else None
        if health is None:
            raise NodeLost(f"the node {self.replica.node.name} has not said how its runner is")
        return health

    async def occupancy(self) -> wire.Occupancy:
        line = self.replica.node.line
        if line is None:
            raise NodeLost(f"the node {self.replica.node.name} cannot be asked")
        return await line.ask("/occupancy", self.replica.key, wire.Occupancy)


@dataclass(frozen=True)
class ShownReplica:
    replica: Replica
    model: Loadable
    process: Probe

    @property
    def node(self) -> str:
        return self.replica.node.name

    @property
    def state(self) -> State:
        if self.replica.is_leaving:
            return State.DRAINING
        return State(self.replica.reported.state) if self.replica.reported else State.LOADING

    @property
    def reply(self) -> wire.LoadReply | None:
        return self.replica.reply

    @property
    def n_ctx(self) -> int:
        return self.replica.n_ctx

    @property
    def n_parallel(self) -> int:
        return self.replica.n_parallel

    def running(self, now: float) -> Running:
        reported = self.replica.reported
        is_closing = self.state in (State.DRAINING, State.CLOSING)
        left = reported.seconds_left if reported and not is_closing else 0.0
        return Running(self.model, self.reply.memory if self.reply else None, self.n_ctx, left, is_closing, self.node)


class ReplicaTable:
    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._known: dict[str, Known] = {}
        self.labels, self.totals = Labels(), Totals()
        nodes.followers.append(self._count)

    def know(self, loadable: Loadable, model: Model) -> None:
        self._known[model.key] = Known(loadable, model)

    def known(self, key: str) -> Known | None:
        return self._known.get(key)

    def of(self, key: str) -> list[Replica]:
        """Those on nodes that can be reached."""
        return [node.replicas[key] for node in self._nodes.usable() if key in node.replicas]

    def replicas(self) -> Iterator[Replica]:
        """Those that take memory or are about to."""
        for node in self._nodes.values():
            yield from (replica for replica in node.replicas.values() if replica.reported or replica.n_holds)

    def shown(self) -> list[ShownReplica]:
        return [ShownReplica(replica, self._loadable(replica), Probe(replica)) for replica in self.replicas()]

    def running(self) -> list[Running]:
        """The one that stays longest first."""
        return sorted((shown.running(0.0) for shown in self.shown()), key=lambda item: item.seconds_left, reverse=True)

    def runners(self) -> list[tuple[Loadable, Probe]]:
        ready = (State.READY, State.DRAINING)
        return [(shown.model, shown.process) for shown in self.shown() if shown.state in ready]

    def is_pinned(self, model_path: Path) -> bool:
        return any(replica.reported and replica.reported.is_pinned for replica in self.of(key_of(model_path)))

    def reply_of(self, model_path: Path) -> wire.LoadReply | None:
        return next((replica.reply for replica in self.of(key_of(model_path)) if replica.reply), None)

    @property
    def n_waiting(self) -> int:
        return sum(max(0, replica.n_busy - replica.n_parallel) for replica in self.replicas())

    def _loadable(self, replica: Replica) -> Loadable:
        known = self._known.get(replica.key)
        return known.loadable if known else _as_told(replica.reported) if replica.reported else _named(replica.key, "")

    def _count(self, node: Node, report: Report) -> None:
        """What runners have counted, at once: those that end meanwhile will not be asked."""
        runners: list[ReplicaReport | Ended] = [*report.replicas, *report.ended]
        for told in runners:
            if told.health is not None:
                counts, known = told.health.counts, self._known.get(told.key)
                self.totals.heard(told.run, self.labels.of(known.loadable if known else _as_told(told)), counts)
                node.totals.heard(told.run, self.labels.of(_as_told(told)), counts)


def _as_told(told: ReplicaReport | Ended) -> StoredModel:
    """As its node calls it, which another head may have asked for it."""
    return _named(told.name, told.digest)


def _named(name: str, digest: str) -> StoredModel:
    return StoredModel(name=name, full_name=name, digest=digest, n_bytes=0, modified_at=0.0, weights_path=None)
