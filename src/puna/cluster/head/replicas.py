"""What a head knows of the nodes and of the models that they hold: what they report, and what it has sent them since.

Tells no node anything, and decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from puna import wire
from puna.cluster.head.line import Line
from puna.cluster.messages import Held, ReplicaReport, Report
from puna.cluster.routing.demand import Load
from puna.cluster.routing.keys import n_common, n_leading, unpack
from puna.cluster.routing.memory import Room
from puna.cluster.routing.router import Candidate
from puna.server.numbers import Totals

_STAYING = ("loading", "ready")

Leases = dict[Line, int]  # of one request: the number of its Hold on each line


@dataclass(eq=False)
class Replica:
    """A model on a node, loaded or about to be."""

    node: Node
    key: str
    reported: ReplicaReport | None = None
    held: Held | None = None  # what the node said when it was last asked to load it; a report says more
    n_holds: int = 0
    n_sent: int = 0
    is_leaving: bool = False  # this head has asked for its end
    keys: set[int] = field(default_factory=set)
    # Of prompts that are there, and of those that have ended since the last report: the node will tell of them, too.
    _running: dict[int, list[int]] = field(default_factory=dict)
    _ended: list[list[int]] = field(default_factory=list)

    @property
    def is_there(self) -> bool:
        """Whether it is loaded or being loaded, and stays."""
        return not self.is_leaving and (self.n_holds > 0 or (self.reported is not None and self.reported.state in _STAYING))

    @property
    def is_usable(self) -> bool:
        """Whether a request that is sent there now finds it loaded."""
        if self.is_leaving or not self.node.is_usable:
            return False
        state = self.reported.state if self.reported else ""
        return state == "ready" or (self.held is not None and self.n_holds > 0 and state in ("", "loading"))

    @property
    def n_parallel(self) -> int:
        return max(1, self.reported.n_parallel if self.reported else self.held.n_parallel if self.held else 1)

    @property
    def n_running(self) -> int:
        """Requests of this head that are there."""
        return len(self._running)

    @property
    def n_busy(self) -> int:
        """Requests that are there: of this head, and of others as far as they were reported."""
        return self.n_running + (self.reported.n_others if self.reported else 0)

    @property
    def reply(self) -> wire.LoadReply | None:
        reported = self.reported.reply if self.reported else None
        return reported or (self.held.reply if self.held else None)

    @property
    def n_ctx(self) -> int:
        return self.reported.n_ctx if self.reported and self.reported.n_ctx else self.held.n_ctx if self.held else 0

    def candidate(self, keys: list[int]) -> Candidate:
        n_held = max([n_leading(keys, self.keys), *(n_common(keys, sent) for sent in [*self._running.values(), *self._ended])])
        return Candidate(self.node.name, n_held, self.n_busy, self.n_parallel, self.n_sent)

    def load(self) -> Load:
        return Load(self.node.name, self.n_busy, self.n_parallel)

    @contextmanager
    def running(self, keys: list[int]) -> Iterator[None]:
        """A request is there, whose beginning others may go after."""
        self.n_sent += 1
        number = self.n_sent
        self._running[number] = keys
        try:
            yield
        finally:
            self._ended.append(self._running.pop(number))

    def loaded(self, held: Held) -> None:
        """The node has loaded it, or has it with what was asked for: that is newer than its last report."""
        self.held = held
        if self.reported is not None:
            self.reported = msgspec.structs.replace(
                self.reported, state="ready", n_ctx=held.n_ctx, n_parallel=held.n_parallel, reply=held.reply
            )

    def heard(self, report: ReplicaReport) -> None:
        self.reported = report
        self.keys.difference_update(unpack(report.removed))
        self.keys.update(unpack(report.added))
        self._ended.clear()  # a node knows what it has answered before it says so
        self.is_leaving = self.is_leaving and report.state != "loading"


@dataclass(eq=False)
class Node:
    """*line* is None until the node is reached, and again once it is lost."""

    name: str
    line: Line | None = None
    report: Report | None = None
    replicas: dict[str, Replica] = field(default_factory=dict)  # by the models' keys
    found: set[str] = field(default_factory=set)  # files that are there, by digest or path
    deliveries: dict[str, asyncio.Lock] = field(default_factory=dict)  # of files, by the models' keys: one after the other
    has_left: bool = False  # the cluster has said so
    totals: Totals = field(default_factory=Totals)  # of its runners, whatever became of the line to it

    @property
    def is_usable(self) -> bool:
        is_there = self.line is not None and not self.line.is_lost and not self.has_left
        return is_there and self.report is not None and not self.report.is_retiring

    def replica(self, key: str) -> Replica:
        if key not in self.replicas:
            self.replicas[key] = Replica(self, key)
        return self.replicas[key]

    def heard(self, report: Report) -> None:
        self.report = report
        told = {one.key for one in report.replicas}
        for one in report.replicas:
            self.replica(one.key).heard(one)
        for key, replica in list(self.replicas.items()):
            if key not in told:
                replica.reported = None
                replica.keys.clear()
                if not replica.n_holds and not replica.n_running:
                    del self.replicas[key]

    def room(self, key: str) -> Room:
        assert self.report is not None
        idle = sum(
            r.reply.memory.total
            for r in self.replicas.values()
            if r.reply and r.reply.memory and not r.n_busy and not _is_pinned(r)
        )
        return Room(self.name, self.report.free, self.report.total, idle, has_files=key in self.found)

    def lose(self) -> None:
        """All that was known of it is void."""
        self.line = self.report = None
        self.replicas.clear()
        self.found.clear()


def _is_pinned(replica: Replica) -> bool:
    return replica.reported is not None and replica.reported.is_pinned
