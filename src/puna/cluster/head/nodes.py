"""The nodes of a cluster as one head has them: lines to those that are there, made anew when a node comes back.

Which nodes there are, and where, is for a Membership to say; Ray's is in puna.cluster.rays.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from puna import __version__
from puna.cluster.head.line import Line
from puna.cluster.head.replicas import Node
from puna.cluster.messages import Report, Retire
from puna.errors import NodeLost

log = logging.getLogger(__name__)

LOOK_S = 1.0
ONE_AT_A_TIME_S = 600.0  # a node that is renewed has so long before the next one is, whatever becomes of it


@dataclass(frozen=True)
class Place:
    """Where a node listens, and what it wants to be shown."""

    host: str
    port: int
    key: str


class Membership(Protocol):
    async def machines(self) -> set[str]:
        """The names of all machines that are in the cluster now."""
        ...

    async def place(self, machine: str, version: str) -> Place:
        """Where the node of a machine is, started if need be; one of another version is another node.

        Errors: NodeLost when there is none and none can be started.
        """
        ...


Follow = Callable[[Node, Report], None]


class Nodes(Mapping[str, Node]):
    """By name."""

    def __init__(self, membership: Membership, head: str, *, version: str = __version__) -> None:
        self._membership, self._head, self._version = membership, head, version
        self._all: dict[str, Node] = {}
        self._following: dict[str, asyncio.Task[None]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self.followers: list[Follow] = []  # of whatever nodes report

    def __getitem__(self, name: str) -> Node:
        return self._all[name]

    def __iter__(self):  # type: ignore[no-untyped-def]  # noqa: ANN204 - Mapping says what it is
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def usable(self) -> list[Node]:
        return [node for node in self._all.values() if node.is_usable]

    def open(self) -> None:
        self._looking = asyncio.create_task(self._look(), name="machines of the cluster")

    async def close(self) -> None:
        tasks = [task for task in (self._looking, *self._following.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for node in self._all.values():
            if node.line is not None:
                await node.line.close()

    async def news(self, timeout_s: float) -> None:
        """Returns when a node was heard or lost, or after that time."""
        self._news.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        except TimeoutError:
            return

    async def _look(self) -> None:
        while True:
            try:
                machines = await self._membership.machines()
            except NodeLost as error:
                log.warning("the cluster cannot be asked for its machines: %s", error)
            else:
                self._be_told(machines)
            await asyncio.sleep(LOOK_S)

    def _be_told(self, machines: set[str]) -> None:
        for name in machines - self._following.keys():
            self._all[name] = Node(name)
            self._following[name] = asyncio.create_task(self._follow(self._all[name]), name=f"node {name}")
        for name in self._following.keys() - machines:
            log.warning("the machine %s has left the cluster", name)
            node = self._all[name]
            node.has_left = True
            if node.line is not None:
                node.line.lose(f"the machine {name} has left the cluster")
            self._following.pop(name).cancel()
            del self._all[name]

    async def _follow(self, node: Node) -> None:
        """Keep a line to the node of one machine, as long as that is in the cluster."""
        while True:
            try:
                place = await self._membership.place(node.name, self._version)
                line = await Line.connect(place.host, place.port, place.key, self._head, lambda report: self._heard(node, report))
            except NodeLost as error:
                log.warning("%s", error)
                await asyncio.sleep(LOOK_S)
                continue
            node.line = line
            log.info("the node %s is there", node.name)
            is_retired = False
            try:
                await line.ended()
                is_retired = node.report is not None and node.report.is_retiring
            finally:
                await line.close()
                node.lose()
                self._news.set()
            if is_retired:
                log.warning("the node %s has retired: a head of another version starts its own there", node.name)
                return
            log.warning("the line to the node %s has ended", node.name)

    def _heard(self, node: Node, report: Report) -> None:
        node.heard(report)
        for follow in self.followers:
            follow(node, report)
        self._news.set()


async def retired(place: Place, head: str, has_gone: Callable[[], Awaitable[bool]], patience_s: float = ONE_AT_A_TIME_S) -> None:
    """Have a node take no more requests, and wait until it has finished those that it has and is gone."""
    line = await Line.connect(place.host, place.port, place.key, head, lambda _: None)
    try:
        line.send(Retire())
        async with asyncio.timeout(patience_s):
            await line.ended()
            while not await has_gone():
                await asyncio.sleep(0.1)
    except (NodeLost, TimeoutError):
        return
    finally:
        await line.close()
