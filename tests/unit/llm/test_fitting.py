from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puna.errors import OutOfMemory
from puna.llm.fitting import Attempt, Free, negotiate
from puna.llm.layout import GPU, Layout, Policy
from puna.wire import DeviceMemory, LoadReply, MemoryReport

MIB = 1 << 20
DRIVER = 457 * MIB


def gpu(name: str, room: int, library: str = "CUDA", *, is_integrated: bool = False) -> GPU:
    return GPU(name, library, room * MIB + DRIVER, is_integrated)


@dataclass
class Runner:
    """Answers attempts for a model of these sizes, in MiB; *really_free* is what an allocation finds."""

    layers: list[int]
    graph: Callable[[int], int] = lambda n_layers: 5 if n_layers else 0  # on a GPU that holds so many layers
    host_graph: int = 3
    really_free: dict[str, int] = field(default_factory=dict)
    can_measure: bool = True
    attempts: list[Attempt] = field(default_factory=list)

    def answer(self, attempt: Attempt) -> LoadReply:
        self.attempts.append(attempt)
        if not self.can_measure:
            return LoadReply(success=True)
        memory = self.measure(attempt.layout)
        if attempt.operation == "commit":
            for device in memory.devices:
                if device.total > self.really_free.get(device.device, 1 << 60) * (MIB if device.is_gpu else 1):
                    return LoadReply(success=False, error=f"no memory for {device.total // MIB} MiB on {device.device}")
        return LoadReply(success=True, memory=memory)

    def measure(self, layout: Layout) -> MemoryReport:
        n = len(self.layers)
        on_cpu = [size * MIB for size in self.layers]
        devices = []
        for part in layout.parts:
            weights = [size * MIB if part.begin <= i < part.end else 0 for i, size in enumerate(self.layers)]
            on_cpu = [mine - theirs for mine, theirs in zip(on_cpu, weights, strict=True)]
            graph = self.graph(part.end - part.begin) * MIB
            devices.append(DeviceMemory(device=part.device, weights=weights, cache=[0] * n, graph=graph, is_gpu=True))
        devices.append(DeviceMemory(device="CPU", weights=on_cpu, cache=[0] * n, graph=self.host_graph * MIB))
        return MemoryReport(devices=devices, input_weights=10 * MIB, host=2 * MIB)

    @property
    def fitted(self) -> list[dict[str, tuple[int, int]]]:
        return [shown(attempt.layout) for attempt in self.attempts if attempt.operation == "fit"]

    @property
    def committed(self) -> list[dict[str, tuple[int, int]]]:
        return [shown(attempt.layout) for attempt in self.attempts if attempt.operation == "commit"]


def shown(layout: Layout) -> dict[str, tuple[int, int]]:
    return {part.device: (part.begin, part.end) for part in layout.parts}


def load(runner: Runner, free: Free, policy: Policy | None = None) -> LoadReply:
    steps = negotiate(free, policy or Policy())
    attempt = next(steps)
    for _ in range(1000):
        try:
            attempt = steps.send(runner.answer(attempt))
        except StopIteration as stop:
            reply: LoadReply = stop.value
            return reply
    raise AssertionError("it does not end")


def test_without_a_gpu_one_measurement_is_enough() -> None:
    runner = Runner([10, 10, 10])
    assert load(runner, Free(host=1 << 40)).success
    assert (runner.fitted, runner.committed) == ([{}], [{}])


def test_the_layout_is_measured_before_it_is_committed() -> None:
    runner = Runner([10, 10, 10, 10])
    load(runner, Free((gpu("A", 100),), 1 << 40))
    assert runner.fitted == [{}, {"A": (0, 4)}]
    assert runner.committed == [{"A": (0, 4)}]


def test_working_memory_that_shows_only_with_layers_takes_layers_away() -> None:
    runner = Runner([10, 10, 10, 10])
    load(runner, Free((gpu("A", 44),), 1 << 40))  # 40 for all layers, but then 5 more for the graph
    assert runner.fitted == [{}, {"A": (0, 4)}, {"A": (0, 3)}]
    assert runner.committed == [{"A": (0, 3)}]


def test_layouts_that_ask_for_each_other_end_at_the_best_in_between() -> None:
    """The graph of few layers is small, that of many large: four fit by the small one, one by the large one."""
    runner = Runner([10] * 6 + [100], graph=lambda n: 5 if n <= 1 else 15 if n <= 2 else 35)
    load(runner, Free((gpu("A", 45),), 1 << 40))
    assert runner.fitted == [{}, {"A": (2, 6)}, {"A": (5, 6)}, {"A": (3, 6)}, {"A": (4, 6)}]
    assert runner.committed == [{"A": (4, 6)}]


def test_an_allocation_that_fails_is_tried_again_with_less() -> None:
    """The driver needs more than it says."""
    runner = Runner([10] * 12, really_free={"A": 80})
    load(runner, Free((gpu("A", 200),), 1 << 40))
    assert runner.committed[0] == {"A": (0, 12)}
    assert len(runner.committed) > 1
    assert runner.committed[-1]["A"][1] - runner.committed[-1]["A"][0] <= 7
    assert sorted(runner.fitted, key=str) == sorted({str(f): f for f in runner.fitted}.values(), key=str)  # each one once


def test_a_gpu_that_gives_nothing_leaves_the_model_to_the_cpu() -> None:
    runner = Runner([10] * 4, really_free={"A": 0})
    load(runner, Free((gpu("A", 100),), 1 << 40))
    assert runner.committed[-1] == {}


def test_when_the_cpu_cannot_hold_the_rest_the_numbers_are_told() -> None:
    runner = Runner([10] * 4)
    with pytest.raises(OutOfMemory, match=r"model requires more system memory \(55\.0 MiB\) than is available \(50\.0 MiB\)"):
        load(runner, Free(host=50 * MIB))
    assert runner.committed == []
    load(runner, Free((gpu("A", 100),), 50 * MIB))
    assert runner.committed == [{"A": (0, 4)}]


def test_an_integrated_gpu_takes_the_host_s_memory() -> None:
    shared = Free((gpu("I", 100, is_integrated=True),), 50 * MIB)
    with pytest.raises(OutOfMemory, match=r"system memory \(60\.0 MiB\)"):
        load(Runner([10] * 4), shared)


def test_swap_is_used_only_when_nobody_can_make_room() -> None:
    free = Free(host=50 * MIB, swap=20 * MIB)
    with pytest.raises(OutOfMemory, match=r"available \(50\.0 MiB\)"):
        load(Runner([10] * 4), free, Policy(without_swap=True))
    assert load(Runner([10] * 4), free).success
    with pytest.raises(OutOfMemory, match=r"available \(70\.0 MiB\)"):
        load(Runner([10] * 6), free)


def test_a_full_model_or_none() -> None:
    runner = Runner([10] * 4)
    free = Free((gpu("A", 30),), 1 << 40)
    with pytest.raises(
        OutOfMemory, match=r"unable to load full model on GPU: 2 of 4 layers fit; they need 40\.0 MiB.*A 25\.0 MiB"
    ):
        load(runner, free, Policy(must_be_full=True))
    assert runner.committed == []
    load(runner, free, Policy(must_be_full=True, num_gpu=2))
    assert runner.committed == [{"A": (1, 3)}]


def test_layers_that_were_asked_for_are_tried_even_where_they_do_not_fit() -> None:
    runner = Runner([10] * 4)
    load(runner, Free((gpu("A", 10),), 1 << 40), Policy(num_gpu=4))
    assert runner.committed == [{"A": (0, 4)}]
    refused = Runner([10] * 4, really_free={"A": 20})
    with pytest.raises(OutOfMemory, match=r"cannot be allocated with num_gpu = 4: no memory for 45 MiB on A; 45\.0 MiB on A"):
        load(refused, Free((gpu("A", 10),), 1 << 40), Policy(num_gpu=4))
    assert refused.committed == [{"A": (0, 4)}]


def test_an_allocation_on_the_cpu_that_fails_is_an_error() -> None:
    with pytest.raises(OutOfMemory, match="no memory for 43 MiB on CPU"):
        load(Runner([10] * 4, really_free={"CPU": 0}), Free(host=1 << 40))


def test_an_engine_that_cannot_measure_loads_without() -> None:
    runner = Runner([], can_measure=False)
    assert load(runner, Free((gpu("A", 10),), 0)).success
    assert (runner.fitted, runner.committed) == ([{}], [{}])


GPUS = st.lists(
    st.builds(gpu, st.just(""), st.integers(0, 80), is_integrated=st.booleans()),
    max_size=5,
).map(lambda gpus: [replace(one, name=f"G{i}") for i, one in enumerate(gpus)])
MODELS = st.lists(st.integers(1, 30), min_size=2, max_size=10)
# Working memory by number of layers, in any way: also in ways that no layout agrees with.
GRAPHS = st.lists(st.integers(0, 60), min_size=12, max_size=12)
REALLY_FREE = st.dictionaries(st.sampled_from([f"G{i}" for i in range(5)]), st.integers(0, 200))


@settings(max_examples=300)
@given(GPUS, MODELS, GRAPHS, REALLY_FREE, st.one_of(st.none(), st.integers(0, 12)), st.booleans())
def test_it_ends_with_a_sound_layout_or_says_why_not(
    gpus: list[GPU],
    layers: list[int],
    graphs: list[int],
    really_free: dict[str, int],
    num_gpu: int | None,
    must_be_full: bool,
) -> None:
    runner = Runner(layers, graph=lambda n: graphs[n], really_free=really_free)
    policy = Policy(num_gpu=num_gpu, must_be_full=must_be_full)
    try:
        reply = load(runner, Free(tuple(gpus), 1 << 40), policy)
    except OutOfMemory as error:
        may_fail = bool(gpus and (must_be_full or num_gpu))  # an automatic layout can always fall back to the CPU
        assert may_fail, error  # noqa: PT017
        return
    assert reply.memory is not None
    room = {one.name: one.free - DRIVER for one in gpus}
    if num_gpu is None or must_be_full:
        for device in reply.memory.devices:
            assert not device.is_gpu or device.total <= room[device.device]
    n_placed = sum(part.end - part.begin for part in runner.attempts[-1].layout.parts)
    if gpus and (must_be_full or num_gpu is not None):
        assert n_placed == min(len(layers) if num_gpu is None else num_gpu, len(layers))
