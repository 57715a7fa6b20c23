"""Finds places for requests on the nodes of a cluster: what puna.server.placing.scheduler does on one machine.

A model is loaded where its memory is free, on more nodes when requests wait on all that have it, and on fewer when they no
longer do. A request goes to the replica that holds most of its prompt. Which model leaves a node for another is that node's
decision.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from puna.cluster.head.description import described, key_of
from puna.cluster.head.metrics import ClusterMetrics
from puna.cluster.head.model import ModelOnNodes
from puna.cluster.head.nodes import Nodes
from puna.cluster.head.replicas import Leases, Node, Replica
from puna.cluster.head.table import ReplicaTable
from puna.cluster.messages import File, Model, Unload
from puna.cluster.routing.demand import Change, Demand, to_drain
from puna.cluster.routing.memory import in_order
from puna.cluster.routing.router import Candidate, choose
from puna.errors import NodeLost, NotFound, OutOfMemory, Overloaded, PunaError, StoreError
from puna.llm.discovery import Machine
from puna.llm.load import LoadRequirements
from puna.server.labels import Labels
from puna.server.placing.loaded import Loadable

log = logging.getLogger(__name__)

PATIENCE_S = 60.0  # for a first node: Ray starts processes on machines that may just have been started themselves
JUDGE_S = 1.0

# With these a node says no to a model that another one may take.
_NO = (OutOfMemory, Overloaded, StoreError, NotFound)

Route = Callable[[Sequence[Candidate]], Candidate]


@dataclass(frozen=True)
class Acquired:
    runner: ModelOnNodes
    n_ctx: int


class ClusterScheduler:
    def __init__(
        self, nodes: Nodes, *, route: Route = choose, demand: Callable[[], Demand] = Demand, patience_s: float = PATIENCE_S
    ) -> None:
        self.nodes = nodes
        self.models = ReplicaTable(nodes)
        self.machine = Machine()
        self.queue: set[str] = set()  # models that are being loaded somewhere
        self.n_moved: Counter[str] = Counter()  # by the node that was lost
        self.n_broken: Counter[str] = Counter()
        self._lost = Labels()  # a cluster whose machines come and go loses ever new ones
        self._route, self._new_demand, self._patience_s = route, demand, patience_s
        self._demands: dict[str, Demand] = {}
        self._sizes: dict[str, int] = {}  # bytes, as measured where a model was loaded
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self.collectors = (ClusterMetrics(self),)

    def open(self) -> None:
        self.nodes.open()
        self._run(self._judge_all(), "demand for replicas")

    @asynccontextmanager
    async def acquire(
        self, model: Loadable, requirements: LoadRequirements, keep_alive: float | None = None, *, leaves_pinned: bool = False
    ) -> AsyncGenerator[Acquired, None]:
        """As Scheduler.acquire: one replica at least is loaded when the block begins and stays so until it ends.

        Errors: NodeLost when no node can be reached; OutOfMemory when it fits none; what the load raises.
        """
        wanted = described(model, requirements, keep_alive, leaves_pinned=leaves_pinned)
        self.models.know(model, wanted)
        leases: Leases = {}
        async with self._held(wanted, leases, set()) as replica:
            n_ctx = replica.n_ctx or requirements.options.n_ctx
            yield Acquired(ModelOnNodes(self, wanted, leases, requirements.n_ctx_in(n_ctx)), n_ctx)

    @asynccontextmanager
    async def use(
        self, model: Model, leases: Leases, n_ctx: int, lost: set[str], keys: list[int] | None = None
    ) -> AsyncGenerator[Replica, None]:
        """As puna.cluster.head.model.Replicas has it."""
        async with AsyncExitStack() as stack:
            reached = [r for r in self.models.of(model.key) if r.node.name not in lost]
            held = {r.node.name: r for r in reached if r.node.line in leases}  # they stay, whatever is to become of them
            usable = held if held and keys is None else held | {r.node.name: r for r in reached if r.is_usable}
            enough = {name: r for name, r in usable.items() if r.n_ctx >= n_ctx} or usable
            if enough:
                chosen = self._route([replica.candidate(keys or []) for replica in enough.values()])
                log.debug("%s goes to %s, which holds %d of %d blocks", model.name, chosen.node, chosen.n_held, len(keys or []))
                replica = enough[chosen.node]
            else:
                replica = await stack.enter_async_context(self._held(model, leases, lost))
            if keys is not None:
                stack.enter_context(replica.running(keys))
            yield replica

    def moved(self, node: str) -> None:
        self.n_moved[self._lost.named(node)] += 1

    def broken(self, node: str) -> None:
        self.n_broken[self._lost.named(node)] += 1

    def unload(self, model_path: Path) -> None:
        """On all nodes, once the requests that run have ended. Returns at once."""
        for replica in self.models.of(key_of(model_path)):
            self._take_leave(replica)

    async def close(self) -> None:
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.nodes.close()

    # Loading

    @asynccontextmanager
    async def _held(self, model: Model, leases: Leases, lost: set[str]) -> AsyncGenerator[Replica, None]:
        """A replica that stays: one that is there, else one that is loaded now, on the node where it fits best."""
        refused: dict[str, PunaError] = {}
        while True:
            node = await self._node_for(model, lost, refused)
            try:
                async with AsyncExitStack() as attempt:
                    replica = await self._enter(attempt, node, model, leases)
                    kept = attempt.pop_all()
                break
            except NodeLost as error:
                log.info("%s is loaded elsewhere: %s", model.name, error)
                lost.add(node.name)
            except _NO as error:
                log.info("%s is not for the node %s: %s", model.name, node.name, error)
                refused[node.name] = error
        async with kept:
            yield replica

    async def _enter(self, stack: AsyncExitStack, node: Node, model: Model, leases: Leases) -> Replica:
        replica, line = node.replica(model.key), node.line
        if line is None:
            raise NodeLost(f"the node {node.name} was lost")
        replica.n_holds += 1
        replica.is_leaving = False

        def released() -> None:
            replica.n_holds -= 1

        stack.callback(released)
        had_all = not self._to_find(node, model)
        await self._deliver(node, model)
        try:
            lease = await stack.enter_async_context(line.hold(model))
        except NotFound:
            if not had_all:
                raise
            node.found.clear()  # somebody has removed what nothing there names
            await self._deliver(node, model)
            lease = await stack.enter_async_context(line.hold(model))
        leases[line] = lease.number
        stack.callback(leases.pop, line, None)
        replica.loaded(lease.held)
        if lease.held.reply and lease.held.reply.memory:
            self._sizes[model.key] = lease.held.reply.memory.total
        return replica

    async def _node_for(self, model: Model, lost: set[str], refused: dict[str, PunaError]) -> Node:
        """Errors: Overloaded when the server is shutting down; NodeLost; what the first node said that has refused."""
        deadline = asyncio.get_running_loop().time() + self._patience_s
        while True:
            if self._is_closed:
                raise Overloaded("the server is shutting down")
            usable = {node.name: node for node in self.nodes.usable() if node.name not in lost}
            loading = [r for r in self.models.of(model.key) if r.node.name in usable and r.is_there]
            loading = [r for r in loading if r.node.name not in refused]
            if loading:
                return min(loading, key=lambda r: (r.n_busy / r.n_parallel, -r.n_holds, r.node.name)).node
            candidates = [node for name, node in usable.items() if name not in refused]
            if candidates:
                try:
                    return self.nodes[in_order([node.room(model.key) for node in candidates], self._size(model))[0]]
                except OutOfMemory:
                    if not refused:
                        raise
            if refused:
                raise next(iter(refused.values()))
            left = deadline - asyncio.get_running_loop().time()
            if lost or left <= 0:
                raise NodeLost("no node of the cluster that could answer this can be reached")
            await self.nodes.news(left)

    async def _deliver(self, node: Node, model: Model) -> None:
        """Bring what of the model's files the node has not got.

        Errors: NotFound for a file that only its path would find; NodeLost; what the node raises.
        """
        if not self._to_find(node, model) or node.line is None:
            return
        async with node.deliveries.setdefault(model.key, asyncio.Lock()):
            files = self._to_find(node, model)
            for number in await node.line.ask("/find", files, list[int]) if files else ():
                file = files[number]
                if not file.digest:
                    raise NotFound(
                        f"{file.path} is not on the node {node.name}: share the folder, or make a model of it (puna create), "
                        "which is sent where it is needed"
                    )
                log.info("the node %s is sent %s, %.1f MB", node.name, file.digest, file.n_bytes / 1e6)
                await node.line.deliver(Path(file.path), file.digest, file.n_bytes)
            node.found.update(file.key for file in files)

    def _to_find(self, node: Node, model: Model) -> list[File]:
        return [file for file in model.files if file.key not in node.found]

    def _size(self, model: Model) -> int:
        return self._sizes.get(model.key) or sum(file.n_bytes for file in model.files)

    # More and fewer replicas

    async def _judge_all(self) -> None:
        while True:
            await asyncio.sleep(JUDGE_S)
            for key in {replica.key for replica in self.models.replicas()}:
                self._judge(key)

    def _judge(self, key: str) -> None:
        usable = [replica for replica in self.models.of(key) if replica.is_usable]
        demand = self._demands.setdefault(key, self._new_demand())
        loads = [replica.load() for replica in usable]
        change = demand.judge(loads, asyncio.get_running_loop().time())
        known = self.models.known(key)
        if change is Change.START and known is not None and key not in self.queue:
            self._run(self._start_another(known.model), f"another replica of {known.model.name}")
        elif change is Change.DRAIN:
            node = to_drain(loads)
            self._take_leave(next(replica for replica in usable if replica.node.name == node))

    async def _start_another(self, model: Model) -> None:
        """Where it fits beside all that is there; if it does so nowhere, nothing happens."""
        has_it = {replica.node.name for replica in self.models.of(model.key)}
        rooms = [node.room(model.key) for node in self.nodes.usable() if node.name not in has_it]
        n_bytes = self._size(model)
        fitting = [room for room in rooms if room.free >= n_bytes]
        if not fitting:
            return
        node = self.nodes[in_order(fitting, n_bytes)[0]]
        log.info("requests for %s wait on all nodes that have it: %s loads it, too", model.name, node.name)
        self.queue.add(model.key)
        try:
            async with AsyncExitStack() as stack:
                await self._enter(stack, node, msgspec.structs.replace(model, keep_alive=None), {})  # others are to find it
        except PunaError as error:
            log.warning("%s could not be loaded on the node %s: %s", model.name, node.name, error)
        finally:
            self.queue.discard(model.key)

    def _take_leave(self, replica: Replica) -> None:
        if replica.node.line is None:
            return
        log.info("the node %s unloads %s", replica.node.name, replica.key)
        replica.is_leaving = True
        try:
            replica.node.line.send(Unload(key=replica.key))
        except NodeLost as error:
            log.debug("%s", error)

    def _run(self, work: AsyncGenerator[None, None] | object, name: str) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work, name=name)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
