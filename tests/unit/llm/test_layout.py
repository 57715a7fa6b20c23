from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puna.llm.layout import GPU, Demand, Layout, Policy, capacity, fits, n_requested, place
from puna.wire import DeviceLayers, DeviceMemory, MemoryReport

MIB = 1 << 20
DRIVER = 457 * MIB  # what is left free on every GPU


def gpu(name: str, room: int, library: str = "CUDA", *, is_integrated: bool = False) -> GPU:
    """With *room* MiB for layers."""
    return GPU(name, library, room * MIB + DRIVER, is_integrated)


def demand(*layers: int, projector: int = 0, **graph: int) -> Demand:
    return Demand(tuple(n * MIB for n in layers), {name: n * MIB for name, n in graph.items()}, projector * MIB)


def many(count: int) -> list[GPU]:
    return [gpu(f"G{i}", 10) for i in range(count)]


def shown(layout: Layout) -> dict[str, tuple[int, int]]:
    return {part.device: (part.begin, part.end) for part in layout.parts}


EQUAL = demand(10, 10, 10, 10, 10)  # four blocks and the output
DENSE_FIRST = demand(10, 100, 100, 100, 30)  # a mixture of experts: the first block has none

A, B = gpu("A", 100), gpu("B", 100)
IGPU = gpu("I", 100, is_integrated=True)


def far(name: str, room: int) -> GPU:
    """A worker's, which keeps nothing back: it has told what it lends."""
    return GPU(name, "RPC", room * MIB, is_remote=True)


FAR = far("F", 100)


@pytest.mark.parametrize(
    ("gpus", "needs", "policy", "expected"),
    [
        pytest.param([], EQUAL, Policy(), {}, id="no GPU"),
        pytest.param([A], EQUAL, Policy(), {"A": (0, 5)}, id="everything fits"),
        pytest.param([A, B], EQUAL, Policy(), {"A": (0, 5)}, id="one GPU will do"),
        pytest.param([gpu("A", 50), gpu("B", 51)], EQUAL, Policy(), {"B": (0, 5)}, id="the larger of two"),
        pytest.param([gpu("A", 49), gpu("B", 50)], EQUAL, Policy(), {"B": (0, 5)}, id="the only one that is large enough"),
        pytest.param([gpu("A", 50)], EQUAL, Policy(), {"A": (0, 5)}, id="exactly full"),
        pytest.param([gpu("A", 49)], EQUAL, Policy(), {"A": (0, 4)}, id="the output stays behind first"),
        pytest.param([gpu("A", 25)], EQUAL, Policy(), {"A": (2, 4)}, id="then the first blocks"),
        pytest.param([gpu("A", 9)], EQUAL, Policy(), {}, id="not one layer"),
        pytest.param([gpu("A", 35)], demand(10, 10, 10, 10, 4), Policy(), {"A": (1, 5)}, id="a small output counts, too"),
        pytest.param([gpu("A", 30), gpu("B", 30)], EQUAL, Policy(), {"A": (2, 5), "B": (0, 2)}, id="balanced"),
        pytest.param([gpu("A", 20), gpu("B", 30)], EQUAL, Policy(), {"A": (0, 2), "B": (2, 5)}, id="in proportion"),
        pytest.param([gpu("A", 100), gpu("B", 30)], EQUAL, Policy(spread=True), {"A": (1, 5), "B": (0, 1)}, id="spread"),
        pytest.param([A, B], EQUAL, Policy(main_gpu=1), {"B": (0, 5)}, id="the main one of equals"),
        pytest.param([gpu("A", 200), B], EQUAL, Policy(main_gpu=1), {"B": (0, 5)}, id="the main one before a larger one"),
        pytest.param([gpu("A", 200), gpu("B", 20)], EQUAL, Policy(main_gpu=1), {"A": (0, 5)}, id="the main one is too small"),
        pytest.param([A], EQUAL, Policy(main_gpu=7), {"A": (0, 5)}, id="a main one that is not there"),
        pytest.param([A], EQUAL, Policy(num_gpu=0), {}, id="none wanted"),
        pytest.param([A], EQUAL, Policy(num_gpu=1), {"A": (3, 4)}, id="one wanted"),
        pytest.param([A], EQUAL, Policy(num_gpu=2), {"A": (2, 4)}, id="two wanted"),
        pytest.param([A], EQUAL, Policy(num_gpu=4), {"A": (0, 4)}, id="all blocks wanted"),
        pytest.param([A], EQUAL, Policy(num_gpu=5), {"A": (0, 5)}, id="the output wanted"),
        pytest.param([A], EQUAL, Policy(num_gpu=999), {"A": (0, 5)}, id="more than there are"),
        pytest.param([gpu("A", 25)], EQUAL, Policy(num_gpu=4), {"A": (0, 4)}, id="wanted beyond the known memory"),
        pytest.param(
            [gpu("A", 25)], EQUAL, Policy(num_gpu=4, must_be_full=True), {"A": (2, 4)}, id="beyond, with others to evict"
        ),
        pytest.param([gpu("A", 0), gpu("B", 0)], EQUAL, Policy(num_gpu=2), {"A": (3, 4), "B": (2, 3)}, id="wanted, nothing free"),
        pytest.param([A], EQUAL, Policy(overhead=75 * MIB), {"A": (2, 4)}, id="overhead"),
        pytest.param([A], demand(10, 10, 10, 10, 10, A=80), Policy(), {"A": (2, 4)}, id="a graph takes its part"),
        pytest.param([A, B], demand(*[20] * 6, A=50, B=50), Policy(), {"A": (3, 5), "B": (1, 3)}, id="a graph on each"),
        pytest.param([A, B], demand(*[20] * 6, A=50), Policy(), {"A": (3, 5), "B": (1, 3)}, id="an unknown graph is as large"),
        pytest.param([FAR], EQUAL, Policy(), {"F": (0, 5)}, id="another machine alone"),
        pytest.param([far("F", 30), far("G", 20)], EQUAL, Policy(), {"F": (2, 5), "G": (0, 2)}, id="two other machines"),
        pytest.param([far("F", 20), far("G", 10)], EQUAL, Policy(), {"F": (2, 4), "G": (1, 2)}, id="this machine keeps the rest"),
        pytest.param([FAR, gpu("A", 50)], EQUAL, Policy(), {"A": (0, 5)}, id="a GPU here before another machine"),
        pytest.param([FAR, IGPU], EQUAL, Policy(), {"I": (0, 5)}, id="an integrated one here before another machine"),
        pytest.param([FAR, gpu("A", 20)], EQUAL, Policy(), {"A": (3, 5), "F": (0, 3)}, id="another machine takes what is left"),
        pytest.param(
            [far("F", 20), gpu("A", 20), gpu("B", 10, "Vulkan")],
            EQUAL,
            Policy(),
            {"A": (2, 4), "F": (0, 2)},
            id="beside the better of two libraries",
        ),
        pytest.param([FAR], EQUAL, Policy(num_gpu=2), {"F": (2, 4)}, id="so many on another machine"),
        pytest.param([IGPU], EQUAL, Policy(), {"I": (0, 5)}, id="integrated alone"),
        pytest.param([IGPU, gpu("A", 50)], EQUAL, Policy(), {"A": (0, 5)}, id="discrete before integrated"),
        pytest.param([IGPU, gpu("A", 20)], EQUAL, Policy(), {"A": (3, 5), "I": (0, 3)}, id="integrated takes what is left"),
        pytest.param([IGPU, gpu("A", 20)], EQUAL, Policy(num_gpu=1), {"I": (3, 4)}, id="one wanted, of all alike"),
        pytest.param([IGPU, gpu("A", 20)], EQUAL, Policy(num_gpu=999), {"I": (0, 5)}, id="all wanted, of all alike"),
        pytest.param([gpu("A", 30), gpu("V", 40, "Vulkan")], EQUAL, Policy(), {"V": (0, 4)}, id="libraries are not mixed"),
        pytest.param([A, gpu("V", 200, "Vulkan")], EQUAL, Policy(), {"A": (0, 5)}, id="the first library if it takes as much"),
        pytest.param([A, gpu("V", 90, "Vulkan")], EQUAL, Policy(main_gpu=1), {"V": (0, 5)}, id="the main one's library"),
        pytest.param(
            [gpu("A", 229)], DENSE_FIRST, Policy(), {"A": (2, 4)}, id="experts: the dense block does not fit beside them"
        ),
        pytest.param([gpu("A", 310)], DENSE_FIRST, Policy(), {"A": (0, 4)}, id="experts: all blocks"),
        pytest.param([gpu("A", 110), gpu("B", 230)], DENSE_FIRST, Policy(), {"A": (0, 2), "B": (2, 5)}, id="experts: in order"),
        pytest.param(
            [gpu("A", 240), gpu("B", 110)], DENSE_FIRST, Policy(), {"A": (2, 5), "B": (0, 2)}, id="experts: in any order"
        ),
        pytest.param(many(8), demand(*[10] * 8), Policy(), {f"G{i}": (7 - i, 8 - i) for i in range(8)}, id="eight"),
        pytest.param(many(12), demand(*[10] * 3), Policy(), {"G0": (2, 3), "G1": (1, 2), "G10": (0, 1)}, id="twelve"),
    ],
)  # fmt: skip
def test_layers_per_device(gpus: list[GPU], needs: Demand, policy: Policy, expected: dict[str, tuple[int, int]]) -> None:
    assert shown(place(gpus, needs, policy)) == expected


@pytest.mark.parametrize(
    ("gpus", "expected", "holder"),
    [
        ([gpu("A", 80)], {"A": (0, 5)}, "A"),
        ([gpu("A", 79)], {"A": (0, 4)}, "A"),  # it does not go to the CPU because one layer does not fit
        ([gpu("A", 29)], {"A": (2, 4)}, ""),
        ([gpu("A", 40), gpu("B", 25)], {"A": (3, 4), "B": (1, 3)}, "A"),
        ([gpu("I", 90, is_integrated=True), gpu("A", 40)], {"A": (4, 5), "I": (0, 4)}, "A"),
    ],
)
def test_a_projector_goes_to_one_device(gpus: list[GPU], expected: dict[str, tuple[int, int]], holder: str) -> None:
    layout = place(gpus, demand(10, 10, 10, 10, 10, projector=30), Policy())
    assert (shown(layout), layout.projector) == (expected, holder)


def test_metal_keeps_more_for_itself() -> None:
    assert capacity(GPU("M", "Metal", 600 * MIB), EQUAL, Policy()) == 88 * MIB


def test_a_backoff_leaves_a_share_free() -> None:
    assert capacity(gpu("A", 80), EQUAL, Policy(), backoff=0.5) == 40 * MIB
    assert capacity(gpu("A", 80), EQUAL, Policy(), backoff=1.0) == 0
    assert shown(place([gpu("A", 80)], EQUAL, Policy(), backoff=0.5)) == {"A": (0, 4)}


def test_what_a_report_says() -> None:
    report = MemoryReport(
        devices=[
            DeviceMemory(device="A", weights=[0, 7, 9], cache=[0, 1, 0], graph=5, is_gpu=True, projector=2),
            DeviceMemory(device="B", weights=[0, 0, 0], cache=[0, 0, 0], graph=0, is_gpu=True),
            DeviceMemory(device="CPU", weights=[6, 0, 0], cache=[1, 0, 0], graph=3, projector=1),
        ],
        input_weights=100,
    )
    known = Demand((), {"B": 4}).after(report)
    assert known.layers == (7, 8, 9)
    assert known.graph == {"A": 5, "B": 4}  # a GPU that held nothing has shown nothing
    assert known.projector == 3
    assert report.total == 100 + 5 + 17 + 2 + 7 + 3 + 1


GPUS = st.lists(
    st.builds(gpu, st.just(""), st.integers(0, 60), st.sampled_from(["CUDA", "CUDA", "Vulkan"]), is_integrated=st.booleans()),
    max_size=8,
).map(lambda gpus: [replace(one, name=f"G{i}") for i, one in enumerate(gpus)])
DEMANDS = st.builds(
    lambda layers, projector: demand(*layers, projector=projector),
    st.lists(st.integers(1, 40), min_size=2, max_size=12),
    st.sampled_from([0, 0, 15]),
)
WISHES = st.builds(
    Policy,
    num_gpu=st.one_of(st.none(), st.integers(0, 14)),
    main_gpu=st.one_of(st.none(), st.integers(0, 9)),
    spread=st.booleans(),
    overhead=st.sampled_from([0, 5 * MIB]),
    must_be_full=st.booleans(),
)


def greedy(gpus: Sequence[GPU], needs: Demand, policy: Policy) -> int:
    """Layers that somebody places who fills one GPU after the other, whatever their order."""
    layers = needs.layers if n_requested(needs, policy) > needs.n_blocks else needs.layers[:-1]
    best = 0
    for order in permutations(gpus) if len(gpus) <= 4 else [gpus, gpus[::-1], sorted(gpus, key=lambda g: -g.free)]:
        rest = list(layers)
        for one in order:
            room = capacity(one, needs, policy)
            while rest and rest[-1] <= room:
                room -= rest.pop()
        best = max(best, min(len(layers) - len(rest), n_requested(needs, policy)))
    return best


@settings(max_examples=300)
@given(GPUS, DEMANDS, WISHES)
def test_no_gpu_holds_more_than_it_may(gpus: list[GPU], needs: Demand, policy: Policy) -> None:
    layout = place(gpus, needs, policy)
    if policy.num_gpu is None or policy.must_be_full:
        assert fits(layout, gpus, needs, policy)


@settings(max_examples=300)
@given(GPUS, DEMANDS, WISHES)
def test_ranges_are_neighbours_that_end_with_the_model_and_share_a_library(
    gpus: list[GPU], needs: Demand, policy: Policy
) -> None:
    layout = place(gpus, needs, policy)
    assert layout == place(gpus, needs, policy)  # the same every time
    if not layout.parts:
        return
    for one, following in zip(layout.parts, layout.parts[1:], strict=False):
        assert one.end == following.begin
    assert all(part.begin < part.end for part in layout.parts)
    assert layout.parts[-1].end in (len(needs.layers), needs.n_blocks)
    names = [part.device for part in layout.parts]
    assert len(set(names)) == len(names)
    assert len({one.library for one in gpus if one.name in names}) == 1
    assert layout.n_layers <= n_requested(needs, policy)
    if policy.num_gpu is not None and not policy.must_be_full:
        assert layout.n_layers == n_requested(needs, policy)


@settings(max_examples=300)
@given(GPUS, DEMANDS, WISHES)
def test_never_fewer_layers_than_filling_one_gpu_after_the_other(gpus: list[GPU], needs: Demand, policy: Policy) -> None:
    needs = replace(needs, projector=0)
    policy = replace(policy, main_gpu=None)  # it may choose a library with less room
    discrete = [one for one in gpus if not one.is_integrated]
    for library in {one.library for one in gpus}:
        alike = gpus if policy.num_gpu is not None or policy.spread else discrete
        group = [one for one in alike if one.library == library]
        assert place(gpus, needs, policy).n_layers >= greedy(group, needs, policy)


@settings(max_examples=200)
@given(GPUS, DEMANDS)
def test_more_memory_never_means_fewer_layers(gpus: list[GPU], needs: Demand) -> None:
    alike = [replace(one, library="CUDA", is_integrated=False) for one in gpus]
    more = [replace(one, free=one.free + 7 * MIB) for one in alike]
    assert (
        place(more, replace(needs, projector=0), Policy()).n_layers
        >= place(alike, replace(needs, projector=0), Policy()).n_layers
    )


def test_parts_are_what_the_runner_takes() -> None:
    assert place([gpu("A", 20), gpu("B", 30)], EQUAL, Policy()).parts == (
        DeviceLayers(device="A", begin=0, end=2),
        DeviceLayers(device="B", begin=2, end=5),
    )
