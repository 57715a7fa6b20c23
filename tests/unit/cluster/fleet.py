"""Nodes with scripted runners, all in this process, and a head that reaches them over real connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from puna import __version__, wire
from puna.cluster.head.nodes import Nodes, Place
from puna.cluster.head.scheduler import ClusterScheduler
from puna.cluster.node.node import Node
from puna.cluster.node.service import Service
from puna.errors import NodeLost
from puna.llm.launch import Launcher
from puna.llm.load import LoadRequirements
from puna.llm.runner import Runner
from puna.settings import Settings
from tests.patience import PATIENCE_S
from tests.unit.llm.fake_machine import FakeMachine
from tests.unit.llm.scripted import fake_command, write_script

KEY = "the key of this cluster"


@dataclass(frozen=True)
class Scripted:
    model_path: Path
    digest: str = ""


@dataclass(eq=False)
class Machine:
    """One of the cluster."""

    service: Service
    port: int
    is_idle: asyncio.Event


@dataclass(eq=False)
class Fleet:
    """Also the membership that the head asks."""

    folder: Path
    machines_: dict[str, Machine] = field(default_factory=dict)
    versions: list[str] = field(default_factory=list)

    async def machines(self) -> set[str]:
        return set(self.machines_)

    async def place(self, machine: str, version: str) -> Place:
        self.versions.append(version)
        if machine not in self.machines_:
            raise NodeLost(f"there is no {machine}")
        return Place("127.0.0.1", self.machines_[machine].port, KEY)

    async def add(
        self, name: str, *, free: int = 1 << 40, grace_s: float = 60.0, store: Path | None = None, limit: int = 0, **settings: Any
    ) -> Machine:
        async def start(path: Path) -> Runner:
            own = self.folder / f"{name}.{path.name}"
            return await Runner.start(fake_command(own if own.exists() else path))

        folder = store or self.folder / f"models of {name}"
        own_settings = replace(Settings(), models=folder, warm_spare=False, **settings)
        node = Node(own_settings, launcher=Launcher(start=start, machine=FakeMachine(free=free)), memory_limit=limit)
        is_idle = asyncio.Event()
        service = Service(node, name, KEY, idle=is_idle.set, grace_s=grace_s)
        machine = Machine(service, await service.open("127.0.0.1"), is_idle)
        self.machines_[name] = machine
        return machine

    async def lose(self, name: str) -> None:
        """As if the machine was switched off."""
        machine = self.machines_.pop(name)
        await machine.service.close()

    def script(self, name: str = "model", node: str = "", **script: Any) -> Scripted:
        """A model; with *node* how it behaves there, whatever it does elsewhere."""
        write_script(self.folder, f"{node}.{name}" if node else name, **script)
        return Scripted(self.folder / name)

    @asynccontextmanager
    async def head(self, **options: Any) -> AsyncGenerator[ClusterScheduler, None]:
        scheduler = ClusterScheduler(Nodes(self, "a head", version=options.pop("version", __version__)), **options)
        scheduler.open()
        try:
            await until(lambda: len(scheduler.nodes.usable()) == len(self.machines_))
            yield scheduler
        finally:
            await scheduler.close()

    async def close(self) -> None:
        for name in list(self.machines_):
            await self.lose(name)


@asynccontextmanager
async def fleet(folder: Path, *names: str, **options: Any) -> AsyncGenerator[Fleet, None]:
    found = Fleet(folder)
    try:
        for name in names:
            await found.add(name, **options)
        yield found
    finally:
        await found.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


def requirements(**options: Any) -> LoadRequirements:
    return LoadRequirements(wire.LoadOptions(n_ctx=128, **options))


@dataclass
class Told:
    """What became of a request."""

    text: str = ""
    n_pieces: int = 0
    done: wire.Done | None = None
    error: Exception | None = None


async def ask(
    scheduler: ClusterScheduler,
    model: Scripted,
    prompt: str = "why",
    *,
    options: LoadRequirements | None = None,
    told: Told | None = None,
) -> Told:
    """*told* learns of each piece as it comes."""
    told = told or Told()
    with contextlib.suppress(Exception):
        try:
            async with scheduler.acquire(model, options or requirements()) as acquired:
                async for reply in acquired.runner.complete(wire.CompletionRequest(prompt=prompt)):
                    if isinstance(reply, wire.Piece):
                        told.text += reply.content
                        told.n_pieces += 1
                    elif isinstance(reply, wire.Done):
                        told.done = reply
        except Exception as error:
            told.error = error
            raise
    return told
