from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from puna import wire
from puna.errors import LoadError, Overloaded, PunaError
from puna.llm.load import LoadRequirements
from puna.llm.runner import Runner
from puna.server.placing.loaded import Loaded, State
from puna.server.placing.scheduler import Scheduler
from puna.settings import FOREVER, Settings
from tests import clock
from tests.unit.llm.fake_machine import FakeMachine


@dataclass(frozen=True)
class Model:
    name: str

    @property
    def model_path(self) -> Path:
        return Path(f"/blobs/{self.name}")


A, B, C, D = (Model(name) for name in "abcd")
DEFAULT = LoadRequirements(wire.LoadOptions())


def n_ctx(number: int) -> LoadRequirements:
    return LoadRequirements(wire.LoadOptions(n_ctx=number), frozenset({"n_ctx"}))


class StubRunner(Runner):
    """A runner without a process: loads when told, dies when told."""

    def __init__(self, world: World, path: Path) -> None:
        self.world, self.path = world, path
        self.ended = asyncio.Event()
        self.memory: wire.MemoryReport | None = None
        self.closed = False

    @property
    def is_alive(self) -> bool:
        return not self.ended.is_set()

    async def wait(self) -> int:
        await self.ended.wait()
        return 0

    @property
    def has_crashed(self) -> bool:
        return not self.closed

    @property
    def has_served(self) -> bool:
        return False

    @property
    def pid(self) -> int:
        return 0x7FFFFFFF  # nobody

    async def try_load(self, request: wire.LoadRequest, stall_timeout_s: float) -> wire.LoadReply:
        parts, options = request.options.gpu_layers, request.options
        n_tokens = options.n_pool or options.n_ctx * options.n_parallel
        n_contexts = n_tokens // options.n_ctx
        memory = self.world.memory(self.path.name, parts, n_contexts, n_tokens)
        if request.operation == "commit":
            self.memory = memory
            self.world.loads.append((self.path.name, request.options.n_ctx))
            self.world.contexts[self.path.name] = n_contexts
            self.world.layers[self.path.name] = {part.device: (part.begin, part.end) for part in parts}
        return wire.LoadReply(success=True, n_ctx=request.options.n_ctx, memory=memory)

    async def wait_until_ready(self, stall_timeout_s: float) -> None:
        await self.world.gate.wait()
        if error := self.world.errors.get(self.path.name):
            raise error

    async def health(self, timeout_s: float = 0) -> wire.Health:
        return wire.Health(status="ready")

    async def close(self) -> None:
        await self.world.closing_gate.wait()
        self.closed = True
        self.ended.set()
        self.world.closed.append(self.path.name)


@dataclass
class World:
    settings: Settings = field(default_factory=lambda: Settings(keep_alive=FOREVER))
    loads: list[tuple[str, int]] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    runners: list[StubRunner] = field(default_factory=list)
    errors: dict[str, PunaError] = field(default_factory=dict)
    needs: dict[str, int] = field(default_factory=dict)  # bytes by model
    n_layers: int = 2  # of every model, the output included
    per_context: dict[str, int] = field(default_factory=dict)  # further bytes by model, for each context of its cache
    per_token: dict[str, int] = field(default_factory=dict)  # further bytes by model, for each token of its cache
    contexts: dict[str, int] = field(default_factory=dict)  # by model, as committed
    layers: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)  # by model and GPU, as committed
    machine: FakeMachine = field(default_factory=FakeMachine)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    closing_gate: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()
        self.closing_gate.set()
        self.scheduler = Scheduler(self.settings, self.launch, self.machine)
        self.machine.taken = self.taken

    async def launch(self, path: Path) -> Runner:
        self.runners.append(StubRunner(self, path))
        return self.runners[-1]

    def memory(self, model: str, parts: list[wire.DeviceLayers], n_contexts: int, n_tokens: int) -> wire.MemoryReport:
        total = self.needs.get(model, 0) + self.per_context.get(model, 0) * n_contexts + self.per_token.get(model, 0) * n_tokens
        n, size = self.n_layers, total // self.n_layers
        weights = {part.device: [size if part.begin <= i < part.end else 0 for i in range(n)] for part in parts}
        on_cpu = [size - sum(column) for column in zip(*weights.values(), strict=True)] if weights else [size] * n
        devices = [wire.DeviceMemory(device=d, weights=w, cache=[0] * n, graph=0, is_gpu=True) for d, w in weights.items()]
        cpu = wire.DeviceMemory(device="CPU", weights=on_cpu, cache=[0] * n, graph=0)
        return wire.MemoryReport(devices=[*devices, cpu], input_weights=0)

    def taken(self) -> dict[str, int]:
        """Bytes on GPUs, of runners that live."""
        found: Counter[str] = Counter()
        for runner in self.runners:
            if runner.is_alive and runner.memory:
                found.update({d.device: d.total for d in runner.memory.devices if d.is_gpu})
        return found

    @property
    def states(self) -> dict[str, State]:
        return {path.name: loaded.state for path, loaded in self.scheduler.models.items()}

    async def touch(self, model: Model, wanted: LoadRequirements = DEFAULT, keep_alive: float | None = None) -> None:
        async with self.scheduler.acquire(model, wanted, keep_alive):
            pass
        await settle()

    @asynccontextmanager
    async def user(
        self, model: Model, wanted: LoadRequirements = DEFAULT, keep_alive: float | None = None
    ) -> AsyncGenerator[User, None]:
        """Somebody who holds a model until told to leave."""
        user = User()
        user.task = asyncio.create_task(self._hold(user, model, wanted, keep_alive))
        await settle()
        try:
            yield user
        finally:
            await user.leave()

    async def _hold(self, user: User, model: Model, wanted: LoadRequirements, keep_alive: float | None) -> None:
        async with self.scheduler.acquire(model, wanted, keep_alive) as loaded:
            user.loaded = loaded
            await user.may_leave.wait()


@dataclass
class User:
    task: asyncio.Task[None] = field(init=False)
    loaded: Loaded | None = None
    may_leave: asyncio.Event = field(default_factory=asyncio.Event)

    async def leave(self) -> None:
        self.may_leave.set()
        await asyncio.wait({self.task})
        await settle()

    async def disconnect(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})
        await settle()

    @property
    def error(self) -> BaseException | None:
        return self.task.exception() if self.task.done() and not self.task.cancelled() else None


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def play(scenario: Callable[[World], Coroutine[Any, Any, None]], **settings: Any) -> None:
    """Run a scenario, then shut down; nothing may be left over."""

    async def run() -> None:
        world = World(replace(Settings(keep_alive=FOREVER), **settings))
        async with asyncio.timeout(20):
            await scenario(world)
        world.gate.set()
        world.closing_gate.set()
        await world.scheduler.close()
        assert world.states == {}
        assert all(runner.ended.is_set() for runner in world.runners)
        assert len(asyncio.all_tasks()) == 1

    clock.run(run())


def test_a_loaded_model_is_reused() -> None:
    async def scenario(world: World) -> None:
        for _ in range(3):
            await world.touch(A)
        assert world.loads == [("a", 4096)]
        assert world.states == {"a": State.READY}

    play(scenario)


def test_concurrent_requests_share_one_load() -> None:
    async def scenario(world: World) -> None:
        world.gate.clear()
        async with world.user(A) as one, world.user(A) as two:
            assert world.states == {"a": State.LOADING}
            assert one.loaded is two.loaded is None
            world.gate.set()
            await settle()
            assert one.loaded is two.loaded is not None
        assert len(world.loads) == 1

    play(scenario)


def test_a_load_survives_the_first_requester() -> None:
    async def scenario(world: World) -> None:
        world.gate.clear()
        async with world.user(A) as one, world.user(A) as two:
            await one.disconnect()
            world.gate.set()
            await settle()
            assert two.loaded is not None
        assert len(world.loads) == 1
        assert world.closed == []

    play(scenario)


def test_a_load_that_nobody_wants_any_more_is_cancelled() -> None:
    async def scenario(world: World) -> None:
        world.gate.clear()
        async with world.user(A) as one, world.user(A) as two:
            await one.disconnect()
            await two.disconnect()
            assert world.states == {}
            assert world.closed == ["a"]
        world.gate.set()
        await world.touch(A)
        assert len(world.loads) == 2

    play(scenario)


def test_a_failed_load_is_told_to_those_who_wait_and_forgotten() -> None:
    async def scenario(world: World) -> None:
        world.gate.clear()
        world.errors["a"] = LoadError("bad file")
        async with world.user(A) as one, world.user(A) as two:
            world.gate.set()
            await settle()
            assert str(one.error) == str(two.error) == "bad file"
        assert world.states == {}
        assert world.closed == ["a"]
        world.errors.clear()
        await world.touch(A)
        assert world.states == {"a": State.READY}

    play(scenario)


def test_a_runner_that_cannot_be_launched_fails_the_request() -> None:
    async def scenario(world: World) -> None:
        async def launch(path: Path) -> Runner:
            raise LoadError("no such program")

        world.scheduler.launch = launch
        with pytest.raises(LoadError, match="no such program"):
            await world.touch(A)
        await settle()
        assert world.states == {}

    play(scenario)


@pytest.mark.parametrize(
    ("first", "second", "n_loads"),
    [
        (n_ctx(4096), n_ctx(8192), 2),
        (n_ctx(8192), n_ctx(4096), 1),  # a larger context serves a smaller one
        (n_ctx(8192), DEFAULT, 1),
        (LoadRequirements(wire.LoadOptions(n_threads=2), frozenset({"n_threads"})), DEFAULT, 1),
        (DEFAULT, LoadRequirements(wire.LoadOptions(n_threads=2), frozenset({"n_threads"})), 2),
        (DEFAULT, LoadRequirements(wire.LoadOptions(kv_cache_type="q8_0")), 2),
        (DEFAULT, LoadRequirements(wire.LoadOptions(flash_attention=False)), 2),
    ],
)
def test_reload_only_when_the_options_need_it(first: LoadRequirements, second: LoadRequirements, n_loads: int) -> None:
    async def scenario(world: World) -> None:
        await world.touch(A, first)
        await world.touch(A, second)
        assert len(world.loads) == n_loads
        assert len(world.closed) == n_loads - 1

    play(scenario)


def test_a_reload_waits_for_running_requests_and_holds_new_ones_back() -> None:
    """Else a steady stream of requests with the old options would keep the new ones waiting for ever."""

    async def scenario(world: World) -> None:
        async with world.user(A) as running, world.user(A, n_ctx(8192)) as larger, world.user(A) as late:
            assert world.states == {"a": State.DRAINING}
            assert larger.loaded is late.loaded is None
            await running.leave()
            assert larger.loaded is late.loaded is not None
        assert world.loads == [("a", 4096), ("a", 8192)]

    play(scenario)


def test_a_reload_wanted_during_a_load_comes_after_it() -> None:
    async def scenario(world: World) -> None:
        world.gate.clear()
        async with world.user(A) as one, world.user(A, n_ctx(8192)) as two:
            world.gate.set()
            await settle()
            assert one.loaded is not None
            assert two.loaded is None
            await one.leave()
            assert two.loaded is not None
        assert world.loads == [("a", 4096), ("a", 8192)]

    play(scenario)


def test_a_model_stops_draining_when_the_one_who_wanted_it_leaves() -> None:
    async def scenario(world: World) -> None:
        async with world.user(A) as running, world.user(A, n_ctx(8192)) as larger, world.user(A) as late:
            await larger.disconnect()
            assert world.states == {"a": State.READY}
            assert late.loaded is running.loaded
        assert len(world.loads) == 1

    play(scenario)


def test_the_keep_alive_timer_runs_while_idle() -> None:
    async def scenario(world: World) -> None:
        async with world.user(A, keep_alive=0.05):
            await asyncio.sleep(0.1)
            assert world.states == {"a": State.READY}
        await asyncio.sleep(0.03)
        await world.touch(A)
        await asyncio.sleep(0.03)
        assert world.states == {"a": State.READY}  # the second request started the timer again
        await asyncio.sleep(0.05)
        assert world.states == {}

    play(scenario)


@pytest.mark.parametrize(
    ("default", "requested", "stays"), [(0.02, None, False), (0.02, FOREVER, True), (FOREVER, 0.0, False), (0.0, None, False)]
)
def test_a_requests_keep_alive_wins_over_the_default(default: float, requested: float | None, stays: bool) -> None:
    async def scenario(world: World) -> None:
        await world.touch(A, keep_alive=requested)
        await asyncio.sleep(0.05)
        assert world.states == ({"a": State.READY} if stays else {})

    play(scenario, keep_alive=default)


def test_a_keep_alive_stays_until_another_request_sets_one() -> None:
    async def scenario(world: World) -> None:
        await world.touch(A, keep_alive=FOREVER)
        await world.touch(A)
        await asyncio.sleep(0.05)
        assert world.states == {"a": State.READY}

    play(scenario, keep_alive=0.02)


def test_load_only_request_keeps_the_model() -> None:
    """A request that ends in the same turn of the loop as its load must not take the model with it."""

    async def scenario(world: World) -> None:
        await world.touch(A)
        assert world.states == {"a": State.READY}

    play(scenario)


def test_eviction_takes_the_idle_model_that_expires_first() -> None:
    async def scenario(world: World) -> None:
        await world.touch(A, keep_alive=50)
        await world.touch(B, keep_alive=20)
        async with world.user(C, keep_alive=1):
            await world.touch(D)
            assert world.closed == ["b"]
            assert set(world.states) == {"a", "c", "d"}

    play(scenario)


def test_a_busy_model_is_waited_for_when_none_is_idle() -> None:
    async def scenario(world: World) -> None:
        async with world.user(A, keep_alive=5) as a, world.user(B) as b, world.user(C) as c:
            assert world.states == {"a": State.DRAINING, "b": State.READY}
            async with world.user(B):
                pass  # the other model goes on serving
            async with world.user(A) as late:
                assert late.loaded is None
                await a.leave()
                assert c.loaded is not None
                await b.leave()
                assert late.loaded is not None
        assert [name for name, _ in world.loads] == ["a", "b", "c", "a"]

    play(scenario, max_loaded_models=2)


def test_whichever_model_becomes_idle_first_gives_its_place() -> None:
    async def scenario(world: World) -> None:
        async with world.user(A, keep_alive=5) as a, world.user(B) as b, world.user(C) as c:
            await b.leave()
            assert c.loaded is not None
            assert world.states["a"] is State.READY
            assert a.loaded is not None
        assert world.closed == ["b"]

    play(scenario, max_loaded_models=2)


def test_an_eviction_is_called_off_with_the_request_that_wanted_it() -> None:
    async def scenario(world: World) -> None:
        async with world.user(A, keep_alive=0.02) as a, world.user(B) as b:
            assert world.states["a"] is State.DRAINING
            await b.disconnect()
            assert world.states == {"a": State.READY}
            await a.leave()
            assert world.states == {"a": State.READY}
            await asyncio.sleep(0.05)
            assert world.states == {}  # its timer was started

    play(scenario, max_loaded_models=1)


def test_two_waiting_models_get_two_places() -> None:
    async def scenario(world: World) -> None:
        await world.touch(A)
        await world.touch(B)
        world.closing_gate.clear()
        async with world.user(C) as c, world.user(D) as d, world.user(C) as also_c:
            assert set(world.states.values()) == {State.CLOSING}
            world.closing_gate.set()
            await settle()
            assert c.loaded is also_c.loaded is not None
            assert d.loaded is not None

    play(scenario, max_loaded_models=2)


def test_nothing_loads_before_the_evicted_process_is_gone() -> None:
    async def scenario(world: World) -> None:
        await world.touch(A)
        world.closing_gate.clear()
        async with world.user(B) as b:
            assert world.states == {"a": State.CLOSING}
            world.closing_gate.set()
            await settle()
            assert b.loaded is not None

    play(scenario, max_loaded_models=1)


def test_a_loaded_model_never_waits_behind_another_ones_load() -> None:
    async def scenario(world: World) -> None:
        await world.touch(A, keep_alive=100)
        await world.touch(B, keep_alive=10)
        world.gate.clear()
        world.closing_gate.clear()
        async with world.user(C) as waiting, world.user(A) as served:  # one closes, one is to load, one serves
            assert waiting.loaded is None
            assert served.loaded is not None
            world.closing_gate.set()
            await settle()
            async with world.user(A) as also_served:
                assert world.states == {"a": State.READY, "c": State.LOADING}
                assert also_served.loaded is not None
            world.gate.set()
            await settle()

    play(scenario, max_loaded_models=2)


def test_explicit_unload_lets_running_requests_finish_and_new_ones_load_anew() -> None:
    async def scenario(world: World) -> None:
        async with world.user(A) as running:
            world.scheduler.unload(A.model_path)
            assert world.states == {"a": State.DRAINING}
            async with world.user(A, keep_alive=FOREVER) as late:
                assert late.loaded is None
                await running.leave()
                assert late.loaded is not None
        assert len(world.loads) == 2
        world.scheduler.unload(A.model_path)
        await settle()
        assert world.states == {}
        world.scheduler.unload(A.model_path)  # not loaded: nothing to do

    play(scenario)


def test_unload_during_a_load_takes_effect_after_its_requests() -> None:
    async def scenario(world: World) -> None:
        world.gate.clear()
        async with world.user(A) as one:
            world.scheduler.unload(A.model_path)
            world.gate.set()
            await settle()
            assert one.loaded is not None
        assert world.states == {}

    play(scenario)


def test_a_dead_runner_is_replaced() -> None:
    async def scenario(world: World) -> None:
        await world.touch(A)
        world.runners[0].ended.set()
        await settle()
        assert world.states == {}  # noticed at once, not at the next request
        await world.touch(A)
        assert len(world.loads) == 2

    play(scenario)


def test_a_runner_that_dies_in_use_is_replaced_for_the_next_request() -> None:
    async def scenario(world: World) -> None:
        async with world.user(A) as unlucky:
            world.runners[0].ended.set()
            async with world.user(A) as lucky:
                assert lucky.loaded is not None
                assert lucky.loaded is not unlucky.loaded
            await unlucky.leave()
        assert world.states == {"a": State.READY}

    play(scenario)


@pytest.mark.parametrize("max_queue", [1, 2])
def test_a_full_queue_refuses(max_queue: int) -> None:
    async def scenario(world: World) -> None:
        world.gate.clear()
        first = asyncio.create_task(world.touch(A))
        await settle()
        others = [asyncio.create_task(world.touch(A if number % 2 else B)) for number in range(max_queue)]
        await settle()
        for model in (A, B):
            with pytest.raises(Overloaded, match=r"server busy, please try again\.  maximum pending requests exceeded"):
                await world.touch(model)
        world.gate.set()
        await asyncio.gather(first, *others)
        await world.touch(B)

    play(scenario, max_queue=max_queue, max_loaded_models=1)


def test_a_queue_of_zero_still_lets_a_model_take_the_place_of_an_idle_one() -> None:
    async def scenario(world: World) -> None:
        await world.touch(A)
        await world.touch(B)
        assert world.states == {"b": State.READY}

    play(scenario, max_queue=0, max_loaded_models=1)


def test_requests_beyond_what_a_runner_computes_count_as_waiting() -> None:
    async def scenario(world: World) -> None:
        wanted = LoadRequirements(wire.LoadOptions(n_parallel=2))
        async with world.user(A, wanted), world.user(A, wanted), world.user(A, wanted) as waiting:
            assert waiting.loaded is not None
            with pytest.raises(Overloaded):
                await world.touch(A, wanted)
        await world.touch(A, wanted)

    play(scenario, max_queue=1)


def test_running_lists_what_is_loaded_longest_first() -> None:
    async def scenario(world: World) -> None:
        await world.touch(A, keep_alive=50)
        await world.touch(B, keep_alive=100)
        async with world.user(C, n_ctx(2048), keep_alive=70):
            found = world.scheduler.models.running()
            assert [item.model for item in found] == [B, C, A]
            assert found[1].n_ctx == 2048
            assert found[1].seconds_left == 70
            assert 99 < found[0].seconds_left <= 100
            world.scheduler.unload(C.model_path)
            assert [(item.model, item.is_closing) for item in world.scheduler.models.running()][-1] == (C, True)

    play(scenario)


def test_shutdown_refuses_what_waits_and_cancels_loads() -> None:
    async def scenario(world: World) -> None:
        world.gate.clear()
        async with world.user(A) as loading, world.user(B) as queued:
            await world.scheduler.close()
            await settle()
            assert isinstance(loading.error, LoadError)
            assert isinstance(queued.error, Overloaded)
        with pytest.raises(Overloaded, match="shutting down"):
            await world.touch(A)

    play(scenario, max_loaded_models=1)


def test_a_cancelled_waiter_that_was_just_handed_a_model_gives_it_back() -> None:
    async def scenario(world: World) -> None:
        async with world.user(A) as running, world.user(A, n_ctx(8192)) as larger:
            world.gate.clear()
            running.may_leave.set()
            while world.states.get("a") is not State.LOADING and not larger.task.done():
                await asyncio.sleep(0)
            larger.task.cancel()
            await asyncio.wait({larger.task, running.task})
            await settle()
        assert world.states == {}

    play(scenario)


def test_random_comings_and_goings_leave_nothing_behind() -> None:
    import random

    async def scenario(world: World) -> None:
        random_source = random.Random(7)

        async def visitor() -> None:
            await asyncio.sleep(random_source.random() * 0.1)
            wanted = random_source.choice([DEFAULT, n_ctx(4096), n_ctx(8192)])
            keep_alive = random_source.choice([None, 0.0, 0.01, 100.0])
            async with world.scheduler.acquire(random_source.choice([A, B, C, D]), wanted, keep_alive) as loaded:
                assert loaded.options.n_ctx >= wanted.options.n_ctx
                assert len(world.scheduler.models) <= 2
                await asyncio.sleep(random_source.random() * 0.01)

        tasks = [asyncio.create_task(visitor()) for _ in range(200)]
        for _ in range(20):
            await asyncio.sleep(0.01)
            random_source.choice(tasks).cancel()
            alive = [runner for runner in world.runners if runner.is_alive]
            if alive and random_source.random() < 0.3:
                alive[-1].ended.set()
            world.scheduler.unload(random_source.choice([A, B, C, D]).model_path)
        async with asyncio.timeout(10):
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert not [result for result in results if isinstance(result, Exception)]
        assert not world.scheduler.queue
        assert all(loaded.n_users == 0 for loaded in world.scheduler.models.values())

    play(scenario, max_loaded_models=2)
