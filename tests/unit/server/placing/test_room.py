"""Loads that lack memory: who leaves for them, who is waited for, and when they fail."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec
import pytest

from puna import wire
from puna.api.options import Options
from puna.errors import LoadError, OutOfMemory, Overloaded
from puna.llm.load import LoadRequirements, load_requirements
from puna.server.placing.loaded import State
from puna.settings import FOREVER, Settings
from tests.unit.llm.fake_machine import gpu
from tests.unit.server.placing.test_scheduler import DEFAULT, A, B, C, D, World, n_ctx, play, settle

GIB = 1 << 30
DRIVER = 457 << 20


def sized(world: World, free: int, **needs: int) -> None:
    """In GiB; the models have taken nothing yet, so that all they were promised still counts."""
    world.machine.free = free * GIB
    world.needs = {name: size * GIB for name, size in needs.items()}


def test_an_idle_model_leaves_for_one_that_does_not_fit() -> None:
    async def scenario(world: World) -> None:
        sized(world, 10, a=4, b=4, c=4)
        await world.touch(A, keep_alive=100)
        await world.touch(B, keep_alive=50)
        await world.touch(C)
        assert world.closed == ["b"]  # it would have expired first
        assert set(world.states) == {"a", "c"}

    play(scenario)


def test_as_many_leave_as_it_takes_and_no_more() -> None:
    async def scenario(world: World) -> None:
        sized(world, 10, a=2, b=2, c=2, d=7)
        for model, keep_alive in ((A, 30), (B, 20), (C, 10)):
            await world.touch(model, keep_alive=keep_alive)
        await world.touch(D)
        assert world.closed == ["c", "b"]
        assert set(world.states) == {"a", "d"}

    play(scenario, max_loaded_models=10)


def test_a_model_that_fits_beside_the_others_evicts_nobody() -> None:
    async def scenario(world: World) -> None:
        sized(world, 10, a=5, b=5)
        await world.touch(A)
        await world.touch(B)
        assert world.closed == []

    play(scenario)


def test_a_model_that_is_too_large_for_the_machine_fails_with_the_numbers() -> None:
    async def scenario(world: World) -> None:
        sized(world, 10, a=4, b=11)
        await world.touch(A)
        with pytest.raises(OutOfMemory, match=r"requires more system memory \(11\.0 GiB\) than is available \(10\.0 GiB\)"):
            await world.touch(B)
        assert world.loads == [("a", 4096)]  # it was never tried

    play(scenario)


def test_a_busy_model_is_waited_for_and_serves_no_new_requests_meanwhile() -> None:
    async def scenario(world: World) -> None:
        sized(world, 10, a=6, b=6)
        async with world.user(A) as busy, world.user(B) as hungry, world.user(A) as late:
            assert world.states == {"a": State.DRAINING, "b": State.LOADING}
            assert hungry.loaded is late.loaded is None
            await busy.leave()
            assert hungry.loaded is not None
            assert late.loaded is None
            await hungry.leave()
            assert late.loaded is not None
        assert [name for name, _ in world.loads] == ["a", "b", "a"]

    play(scenario)


def test_an_idle_model_leaves_rather_than_a_busy_one() -> None:
    async def scenario(world: World) -> None:
        sized(world, 10, a=4, b=4, c=4)
        await world.touch(B, keep_alive=100)
        async with world.user(A, keep_alive=1), world.user(C) as hungry:
            assert hungry.loaded is not None
            assert world.closed == ["b"]

    play(scenario)


def test_who_is_no_longer_hungry_takes_nobody_s_place() -> None:
    async def scenario(world: World) -> None:
        sized(world, 10, a=6, b=6)
        async with world.user(A) as busy, world.user(B) as hungry:
            assert world.states["a"] is State.DRAINING
            await hungry.disconnect()
            assert world.states == {"a": State.READY}
            async with world.user(A) as late:
                assert late.loaded is busy.loaded

    play(scenario)


def test_a_load_that_waits_for_memory_holds_up_no_loaded_model() -> None:
    async def scenario(world: World) -> None:
        sized(world, 10, a=6, b=6, c=1)
        await world.touch(C, keep_alive=FOREVER)
        async with world.user(A), world.user(B) as hungry, world.user(C) as served:
            assert hungry.loaded is None
            assert served.loaded is not None
            await hungry.disconnect()

    play(scenario)


def test_two_loads_do_not_take_the_same_memory() -> None:
    async def scenario(world: World) -> None:
        sized(world, 10, a=6, b=6)
        world.gate.clear()
        async with world.user(A) as first, world.user(B) as second:
            assert world.loads == [("a", 4096)]
            world.gate.set()
            await settle()
            assert first.loaded is not None
            assert second.loaded is None
            await first.leave()
            assert second.loaded is not None

    play(scenario)


def test_a_pinned_model_never_leaves_for_another_s_memory() -> None:
    async def scenario(world: World) -> None:
        sized(world, 10, a=6, b=6)
        await world.touch(A, keep_alive=FOREVER)
        with pytest.raises(OutOfMemory, match=r"\(6\.0 GiB\) than is available \(4\.0 GiB\)"):
            await world.touch(B)
        await settle()
        assert world.states == {"a": State.READY}
        world.scheduler.unload(A.model_path)
        await settle()
        await world.touch(B)
        assert world.states == {"b": State.READY}

    play(scenario)


def test_a_pinned_model_never_leaves_for_another_s_place() -> None:
    async def scenario(world: World) -> None:
        await world.touch(A, keep_alive=FOREVER)
        await world.touch(B, keep_alive=100)
        await world.touch(C)
        assert world.closed == ["b"]
        async with world.user(C, keep_alive=FOREVER), world.user(A):
            with pytest.raises(Overloaded, match=r"all 2 places are taken by models that were asked to stay.*: a, c; stop one"):
                await world.touch(B)
        await world.touch(A, keep_alive=5)  # whoever asks for another time takes the pin away
        await world.touch(B)
        assert set(world.states) == {"b", "c"}

    play(scenario, max_loaded_models=2)


def test_a_server_that_keeps_models_for_ever_still_makes_room() -> None:
    """OLLAMA_KEEP_ALIVE=-1 says when an idle model goes by itself, not that the first ones loaded are the last."""

    async def scenario(world: World) -> None:
        sized(world, 10, a=6, b=6)
        await world.touch(A)
        await world.touch(B)
        assert world.states == {"b": State.READY}

    play(scenario, keep_alive=FOREVER)


def test_a_load_that_fails_leaves_memory_for_the_next() -> None:
    async def scenario(world: World) -> None:
        sized(world, 10, a=6, b=6)
        world.errors["a"] = LoadError("bad file")
        world.gate.clear()
        async with world.user(A) as unlucky, world.user(B) as lucky:
            world.gate.set()
            await settle()
            assert str(unlucky.error) == "bad file"
            assert lucky.loaded is not None

    play(scenario)


def test_places_grow_with_the_number_of_gpus() -> None:
    async def scenario(world: World) -> None:
        world.machine.devices = [gpu("CUDA0", 8 * GIB), gpu("CUDA1", 8 * GIB)]
        for model in (A, B, C, D):
            await world.touch(model)
        assert len(world.states) == 4

    play(scenario)


@pytest.mark.parametrize(
    ("n_gpus", "first", "second", "n_loads"),
    [
        (1, {}, {"num_gpu": 3}, 2),
        (1, {"num_gpu": 3}, {}, 1),  # nobody asked
        (1, {"num_gpu": 3}, {"num_gpu": 3}, 1),
        (1, {"num_gpu": 3}, {"num_gpu": 0}, 2),
        (0, {"num_gpu": 3}, {"num_gpu": 0}, 1),  # nothing to place anywhere
        (1, {"main_gpu": 0}, {"main_gpu": 1}, 1),
        (2, {"main_gpu": 0}, {"main_gpu": 1}, 2),
        (2, {}, {"main_gpu": 0}, 2),
        (2, {"main_gpu": 1}, {}, 1),
    ],
)
def test_another_placement_means_loading_again(n_gpus: int, first: dict[str, int], second: dict[str, int], n_loads: int) -> None:
    async def scenario(world: World) -> None:
        world.machine.devices = [gpu(f"CUDA{i}", 8 * GIB) for i in range(n_gpus)]
        for placement in (first, second):
            wish = LoadRequirements(wire.LoadOptions(), num_gpu=placement.get("num_gpu"), main_gpu=placement.get("main_gpu"))
            await world.touch(A, wish)
        assert len(world.loads) == n_loads

    play(scenario)


def test_layers_go_where_there_is_room() -> None:
    """The second model gets what the first has left: all of it or, since nothing else may leave, a part."""

    async def scenario(world: World) -> None:
        world.machine.devices = [gpu("CUDA0", 10 * GIB + DRIVER), gpu("CUDA1", 4 * GIB)]
        world.needs = {"a": 8 * GIB, "b": 6 * GIB}
        world.n_layers = 8
        await world.touch(A)
        assert world.layers["a"] == {"CUDA0": (0, 8)}
        await world.touch(B, keep_alive=FOREVER)
        assert world.closed == ["a"]
        assert world.layers["b"] == {"CUDA0": (0, 8)}
        await world.touch(A)
        assert world.closed == ["a"]  # b is pinned
        assert world.layers["a"] == {"CUDA0": (3, 7), "CUDA1": (0, 3)}

    play(scenario)


@pytest.mark.parametrize("wanted", [DEFAULT, n_ctx(8192)])
def test_gpus_that_do_not_tell_are_reckoned_by_what_was_promised(wanted: LoadRequirements) -> None:
    async def scenario(world: World) -> None:
        world.machine.devices = [gpu("CUDA0", 10 * GIB + DRIVER, free=1)]  # as it was before the last model left
        world.machine.knows_gpus = False
        world.needs = {"a": 8 * GIB}
        await world.touch(A, wanted)
        assert world.layers["a"] == {"CUDA0": (0, 2)}

    play(scenario)


def test_requests_share_fewer_contexts_before_anybody_leaves() -> None:
    """Four are wanted, since four requests are computed at once; where nobody said so, they share what fits."""

    async def scenario(world: World) -> None:
        sized(world, 10, a=3, b=1)
        world.per_context = {"b": 2 * GIB, "c": 4 * GIB, "d": 11 * GIB}
        await world.touch(A)
        await world.touch(B)
        assert (world.closed, world.contexts["b"]) == ([], 2)
        await world.touch(C)
        assert (world.closed, world.contexts["c"]) == (["a"], 1)
        with pytest.raises(OutOfMemory, match=r"\(11\.0 GiB\) than is available \(10\.0 GiB\)"):
            await world.touch(D)

    play(scenario)


def test_a_number_of_parallel_requests_that_was_asked_for_is_kept() -> None:
    async def scenario(world: World) -> None:
        sized(world, 10, a=3)
        world.per_context = {"b": 2 * GIB}
        await world.touch(A)
        await world.touch(B)
        assert (world.closed, world.contexts["b"]) == (["a"], 4)

    play(scenario, num_parallel=4)


def test_memory_that_a_driver_gives_back_late_is_waited_for() -> None:
    """Else the next model would be evicted, too, though enough has gone."""

    async def scenario(world: World) -> None:
        world.machine.devices = [gpu("CUDA0", 10 * GIB + DRIVER)]
        world.needs = {"a": 4 * GIB, "b": 4 * GIB, "c": 4 * GIB}
        world.n_layers = 4
        await world.touch(A, keep_alive=50)
        await world.touch(B, keep_alive=100)
        honest, late = world.machine.taken, 3

        def taken() -> dict[str, int]:
            nonlocal late
            if world.closed and late:
                late -= 1
                return {"CUDA0": 8 * GIB}
            return honest()

        world.machine.taken = taken
        await world.touch(C)
        assert (world.closed, late) == (["a"], 0)
        assert world.layers["c"] == {"CUDA0": (0, 4)}

    play(scenario)


def test_who_has_nothing_on_gpus_does_not_leave_for_want_of_them() -> None:
    async def scenario(world: World) -> None:
        world.machine.devices = [gpu("CUDA0", 10 * GIB + DRIVER)]
        world.needs = {"a": 4 * GIB, "b": 8 * GIB, "c": 8 * GIB}
        world.n_layers = 4
        await world.touch(A, LoadRequirements(wire.LoadOptions(), num_gpu=0), keep_alive=1)
        await world.touch(B, keep_alive=100)
        await world.touch(C)
        assert world.closed == ["b"]
        assert world.layers == {"a": {}, "b": {"CUDA0": (0, 4)}, "c": {"CUDA0": (0, 4)}}

    play(scenario)


def test_random_loads_never_take_more_than_there_is() -> None:
    async def scenario(world: World) -> None:
        source = random.Random(11)
        sized(world, 10, a=6, b=5, c=3, d=2)

        def promised() -> int:
            """Of all runners that live and were told to take it."""
            return sum(runner.memory.total for runner in world.runners if runner.is_alive and runner.memory)

        async def visitor() -> None:
            await asyncio.sleep(source.random() * 0.2)
            keep_alive = source.choice([None, 0.0, 0.01, 100.0])
            async with world.scheduler.acquire(source.choice([A, B, C, D]), DEFAULT, keep_alive):
                assert promised() <= 10 * GIB
                await asyncio.sleep(source.random() * 0.01)

        tasks = [asyncio.create_task(visitor()) for _ in range(200)]
        for _ in range(40):
            await asyncio.sleep(0.005)
            source.choice(tasks).cancel()
            world.scheduler.unload(source.choice([A, B, C, D]).model_path)
        async with asyncio.timeout(10):
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert not [result for result in results if isinstance(result, Exception)]
        assert not world.scheduler.queue

    play(scenario, max_loaded_models=4)


def automatic(n_ctx_train: int | None = None, **options: Any) -> LoadRequirements:
    """What a request wants that says nothing of a context."""
    return load_requirements(Options(**options), Settings(num_parallel=1, host_cache=0), n_ctx_train=n_ctx_train)


@pytest.mark.parametrize(
    ("gpus", "n_ctx_train", "expected"),
    [
        ([], None, 4096),
        ([22], None, 4096),
        ([23], None, 32768),
        ([46], None, 32768),
        ([47], None, 262144),
        ([12, 12], None, 32768),
        ([24, 24], None, 262144),
        ([80], 131072, 131072),
        ([80], 2048, 2048),
        ([80], 20000, 20000),
    ],
)
def test_a_context_that_nobody_asked_for_follows_the_memory_of_gpus(
    gpus: list[int], n_ctx_train: int | None, expected: int
) -> None:
    async def scenario(world: World) -> None:
        world.machine.devices = [gpu(f"CUDA{number}", size * GIB) for number, size in enumerate(gpus)]
        await world.touch(A, automatic(n_ctx_train))
        assert world.loads == [("a", expected)]
        assert world.scheduler.models.running()[0].n_ctx == expected

    play(scenario, num_parallel=1)


@pytest.mark.parametrize(("per_token", "expected"), [(1 << 10, 262144), (1 << 18, 32768), (1 << 22, 4096)])
def test_an_automatic_context_takes_no_layer_from_a_gpu(per_token: int, expected: int) -> None:
    async def scenario(world: World) -> None:
        world.machine.devices = [gpu("CUDA0", 48 * GIB)]
        world.needs, world.per_token = {"a": 20 * GIB}, {"a": per_token}
        await world.touch(A, automatic())
        assert world.loads == [("a", expected)]
        assert world.layers["a"] == {"CUDA0": (0, world.n_layers)}

    play(scenario, num_parallel=1)


def test_an_automatic_context_takes_no_place_of_another_model() -> None:
    async def scenario(world: World) -> None:
        world.machine.devices = [gpu("CUDA0", 48 * GIB)]
        world.needs, world.per_token = {"a": 20 * GIB, "b": 20 * GIB}, {"b": 1 << 17}
        await world.touch(A)
        await world.touch(B, automatic())
        assert world.loads == [("a", 4096), ("b", 32768)]
        assert world.closed == []

    play(scenario, num_parallel=1)


def test_a_larger_automatic_context_serves_those_who_ask_for_less_than_it_has() -> None:
    async def scenario(world: World) -> None:
        world.machine.devices = [gpu("CUDA0", 24 * GIB)]
        await world.touch(A, automatic())
        await world.touch(A, n_ctx(20000))
        await world.touch(A, automatic())
        assert world.loads == [("a", 32768)]
        await world.touch(A, n_ctx(40000))
        await world.touch(A, automatic())
        assert world.loads == [("a", 32768), ("a", 40000)]

    play(scenario, num_parallel=1)


@pytest.mark.parametrize("wanted", [{"num_ctx": 4096}, {"num_gpu": 0}])
def test_who_asks_for_a_context_or_for_no_gpu_gets_what_was_asked_for(wanted: dict[str, int]) -> None:
    async def scenario(world: World) -> None:
        world.machine.devices = [gpu("CUDA0", 80 * GIB)]
        await world.touch(A, automatic(**wanted))
        assert world.loads == [("a", 4096)]

    play(scenario, num_parallel=1)


def test_a_context_of_the_settings_is_not_automatic() -> None:
    assert load_requirements(Options(), Settings(context_length=5000)).contexts(80 * GIB) == [5000]


def test_what_does_not_fit_without_a_lost_worker_says_so() -> None:
    async def scenario(world: World) -> None:
        sized(world, 1, a=4)
        world.machine.lost_workers = ["the RPC worker box:50052 cannot be reached: No route to host"]
        with pytest.raises(
            OutOfMemory, match=r"^model requires more system memory .*; the RPC worker box:50052 cannot be reached: No"
        ):
            await world.touch(A)

    play(scenario)


def test_memory_of_other_machines_makes_no_context_longer() -> None:
    """It is for layers; a context that nobody asked for is by the GPUs here."""

    async def scenario(world: World) -> None:
        sized(world, 100, a=2)
        world.machine.devices = [msgspec.structs.replace(gpu("RPC0[box:1]", 200 * GIB, library="RPC"), kind="rpc")]
        await world.touch(A, automatic(1 << 20))
        (running,) = world.scheduler.models.running()
        assert running.n_ctx == 4096
        assert running.memory is not None
        assert running.memory.on_gpus > 0

    play(scenario)
