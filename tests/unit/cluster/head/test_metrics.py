from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from puna import wire
from puna.cluster.head.replicas import Node
from puna.cluster.head.scheduler import ClusterScheduler
from puna.cluster.messages import Report
from puna.server import exposition, labels
from puna.server.metrics import Metrics
from tests.patience import PATIENCE_S
from tests.unit.cluster.fleet import Fleet, Scripted, ask, fleet, requirements, until

ONE = 4  # tokens of a prompt of one word and its answer


class Watcher:
    """Whoever reads the numbers of a head again and again: no counter may ever be less than it was. Those of a machine end with
    it, which is no fall.
    """

    def __init__(self, head: ClusterScheduler) -> None:
        self._nodes = head.nodes
        self._metrics = Metrics(head.models)
        self._metrics.collectors.extend(head.collectors)
        self._last: dict[str, float] = {}

    async def look(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for line in (await exposition.text(self._metrics)).decode().splitlines():
            if line.startswith("puna_"):
                name, value = line.rsplit(" ", 1)
                assert name not in found, f"{name} is told twice"
                found[name] = float(value)
        counters = {name: value for name, value in found.items() if re.match(r"puna_(runner|images|replica)\w*_total", name)}
        last = {name: value for name, value in self._last.items() if _node(name) in (None, *self._nodes)}
        fallen = {name: value for name, value in last.items() if counters.get(name, 0.0) < value}
        assert not fallen, f"{fallen} have become {[counters.get(name) for name in fallen]}"
        self._last = counters
        return found

    async def until(self, name: str, value: float) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while (await self.look()).get(name) != value:
                await asyncio.sleep(0.01)


def _node(name: str) -> str | None:
    found = re.search('node="([^"]*)"', name)
    return found and found[1]


TOKENS = 'puna_runner_tokens_total{model="(file)"}'


def at(node: str) -> str:
    return f'puna_replica_tokens_total{{model="(file)",node="{node}"}}'


async def answered(head: ClusterScheduler, model: Scripted) -> None:
    assert (await ask(head, model)).error is None


async def unloaded(machines: Fleet, head: ClusterScheduler, model: Scripted) -> None:
    head.unload(model.model_path)
    await until(lambda: not list(head.models.replicas()))


async def killed(machines: Fleet, head: ClusterScheduler, model: Scripted) -> None:
    await machines.lose("a")
    await until(lambda: "a" not in head.nodes)


async def updated(machines: Fleet, head: ClusterScheduler, model: Scripted) -> None:
    """A node of another version takes its place."""
    machine = machines.machines_["a"]
    machine.service.retire()
    await asyncio.wait_for(machine.is_idle.wait(), PATIENCE_S)
    await machine.service.close()
    await until(lambda: head.nodes["a"].line is None)


@pytest.mark.parametrize("end", [unloaded, killed, updated])
def test_what_a_replica_has_counted_stays_when_it_has_ended(tmp_path: Path, end: Callable[..., asyncio.Future[None]]) -> None:
    async def play() -> None:
        async with fleet(tmp_path, "a", "b") as machines, machines.head() as head:
            watcher, model = Watcher(head), machines.script()
            await answered(head, model)
            await watcher.until(TOKENS, ONE)
            await end(machines, head, model)
            await watcher.until(TOKENS, ONE)
            await answered(head, model)
            await watcher.until(TOKENS, 2 * ONE)
            assert (await watcher.look())['puna_runner_requests_active{model="(file)"}'] == 0  # those who live, and no more

    asyncio.run(play())


def test_a_replica_that_ends_with_its_request_is_counted_whole(tmp_path: Path) -> None:
    async def play() -> None:
        async with fleet(tmp_path, "a") as machines, machines.head() as head:
            watcher, model = Watcher(head), machines.script()
            for number in range(1, 4):
                async with head.acquire(model, requirements(), 0.0) as acquired:
                    replies = [reply async for reply in acquired.runner.complete(wire.CompletionRequest(prompt="why"))]
                    assert isinstance(replies[-1], wire.Done)
                await until(lambda: not machines.machines_["a"].service.node.loaded())
                await watcher.until(TOKENS, number * ONE)
            assert (await watcher.look())[at("a")] == 3 * ONE

    asyncio.run(play())


def test_a_node_whose_line_broke_is_counted_once_and_so_is_what_it_said_late_or_twice(tmp_path: Path) -> None:
    async def play() -> None:
        async with fleet(tmp_path, "a") as machines, machines.head() as head:
            said: list[tuple[Node, Report]] = []
            head.nodes.followers.append(lambda node, report: said.append((node, report)))
            watcher, model = Watcher(head), machines.script()
            await answered(head, model)
            await watcher.until(TOKENS, ONE)
            line = head.nodes["a"].line
            assert line is not None
            line.lose("it was silent")
            await until(lambda: head.nodes["a"].line not in (None, line))
            await until(lambda: head.nodes.usable())
            await answered(head, model)
            await watcher.until(TOKENS, 2 * ONE)
            await unloaded(machines, head, model)
            await until(lambda: any(report.ended for _, report in said))
            for node, report in reversed(said[:]):
                for follow in head.nodes.followers[:-1]:
                    follow(node, report)
                assert (await watcher.look())[TOKENS] == 2 * ONE
            assert (await watcher.look())[at("a")] == 2 * ONE

    asyncio.run(play())


def test_files_that_share_a_label_are_told_once_and_one_that_ends_takes_nothing_with_it(tmp_path: Path) -> None:
    async def play() -> None:
        async with fleet(tmp_path, "a") as machines, machines.head() as head:
            watcher, first, second = Watcher(head), machines.script("first"), machines.script("second")
            await answered(head, first)
            await answered(head, second)
            await watcher.until(TOKENS, 2 * ONE)
            head.unload(first.model_path)
            await until(lambda: len(list(head.models.replicas())) == 1)
            assert (await watcher.look())[at("a")] == 2 * ONE

    asyncio.run(play())


def test_machines_that_come_and_go_leave_no_numbers_behind_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labels, "MAX_LABELS", 2)

    async def play() -> None:
        async with fleet(tmp_path, "a", "b") as machines, machines.head() as head:
            watcher, model = Watcher(head), machines.script()
            await answered(head, model)
            await watcher.until(at("a"), ONE)
            await machines.lose("a")
            await until(lambda: "a" not in head.nodes)
            found = await Watcher(head).look()  # the node's own numbers have gone with it, those of the model have not
            assert at("a") not in found
            assert found[TOKENS] == ONE
            for number in range(5):
                head.moved(f"machine {number}")
                head.broken(f"machine {number}")
            assert head.n_moved == head.n_broken == Counter({"machine 0": 1, "machine 1": 1, labels.OTHER_LABEL: 3})

    asyncio.run(play())
