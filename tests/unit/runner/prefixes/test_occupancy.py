"""What sequences hold, told in numbers."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from tests.patience import PATIENCE_S
from tests.unit.runner.simulation import Simulation
from tests.unit.runner.test_simulation import tokens
from tests.unit.runner.token_cache import SavingTokenCache

from puna.runner.prefixes import occupancy
from puna.runner.prefixes.host_cache import HostCache
from puna.runner.prefixes.occupancy import look
from puna.runner.prefixes.slots import Slots
from puna.wire import HeldSequence, Occupancy, SavedPrefix, SharedPrefix, encode

MEGABYTE = 1 << 20


def make(count: int) -> tuple[Slots, SavingTokenCache]:
    cache = SavingTokenCache(count)
    return Slots(cache, count, count, HostCache(cache, MEGABYTE, lambda: MEGABYTE)), cache


def run(slots: Slots, cache: SavingTokenCache, tokens: list[int], *, ends: bool = True) -> int:
    sequence, _ = slots.acquire(tokens)
    cache.rows[sequence] = list(tokens)
    slots.record(sequence, tokens, len(tokens))
    if ends:
        slots.release(sequence)
    return sequence


@dataclass
class Running:
    slot: int
    n_prompt: int = 110
    n_generated: int = 5
    is_paused: bool = False


def test_who_holds_how_much_and_what_is_shared() -> None:
    slots, cache = make(4)
    common = list(range(1000, 1100))
    first = run(slots, cache, [*common, *range(100, 300)])
    second = run(slots, cache, [*common, *range(10)], ends=False)
    told = look(slots, [Running(second)], 213)
    assert told == Occupancy(
        computed=213,
        sequences=[
            HeldSequence(sequence=first, tokens=300, last_used=2, node=1),
            HeldSequence(sequence=second, tokens=110, last_used=3, node=2, state="running", prompt=110, generated=5),
        ][::-1],
        prefixes=[
            SharedPrefix(parent=-1, begin=0, end=100, sequences=2),
            SharedPrefix(parent=0, begin=100, end=300, sequences=1),
            SharedPrefix(parent=0, begin=100, end=110, sequences=1),
        ],
    )
    assert look(slots, [Running(second, is_paused=True)]).sequences[0].state == "paused"


def test_what_lost_its_place_is_told_too() -> None:
    slots, cache = make(1)
    for number in range(3):
        run(slots, cache, [1000 * number + i for i in range(100 + number)])
    entries = slots.host_cache.entries() if slots.host_cache else []
    assert look(slots, []).host_cache == [SavedPrefix(tokens=len(e.tokens), bytes=e.n_bytes) for e in reversed(entries)]
    assert [len(e.tokens) for e in entries] == [100, 101]


def test_it_is_bounded_and_says_what_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(occupancy, "MAX_TOLD", 2)
    slots, cache = make(5)
    for number in range(9):
        run(slots, cache, [1000 * number + i for i in range(100)])
    told = look(slots, [])
    assert (len(told.sequences), len(told.prefixes), len(told.host_cache)) == (2, 2, 2)
    assert told.n_left_out >= 3 + 1 + 2
    assert all(s.node < 2 for s in told.sequences)


def test_no_token_of_a_prompt_is_in_it() -> None:
    slots, cache = make(2)
    run(slots, cache, [31337] * 90)
    assert b"31337" not in encode(look(slots, []))


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("restless")
def test_it_may_be_asked_for_while_the_engine_works() -> None:
    simulation = Simulation(n_parallel=4, n_ctx=256, host_cache_bytes=MEGABYTE)
    pictures: list[Occupancy] = []
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            pictures.append(simulation.engine.occupancy())

    pool = ThreadPoolExecutor(1)
    watcher = pool.submit(watch)
    try:
        chance = random.Random(5)
        common = tokens(chance, 60)
        for _ in range(12):
            for n in (5, 20, 40):
                simulation.ask([*common[: chance.randint(0, 60)], *tokens(chance, n)], n_predict=4)
            simulation.run()
    finally:
        is_over.set()
    watcher.result(PATIENCE_S)
    pool.shutdown()
    assert len(pictures) > 10
    for told in pictures:
        assert all(node.parent < place for place, node in enumerate(told.prefixes))
        assert all(held.node < len(told.prefixes) for held in told.sequences)
    last = simulation.engine.occupancy()
    assert last.computed == simulation.n_computed
    assert {held.sequence: held.tokens for held in last.sequences} == {
        slot.sequence: slot.length for slot in simulation.slots.slots if slot.length
    }
