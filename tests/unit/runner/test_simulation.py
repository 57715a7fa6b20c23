"""What the engine promises whatever comes: answers as if alone, an end for everyone in bounded time, little computed twice.

Every row of every step is checked: it sees its own tokens, each at its own position, and nothing else.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.thorough import first
from tests.unit.runner.seeing import KINDS, N_VOCAB
from tests.unit.runner.seeing_library import KINDS as LIBRARY_KINDS
from tests.unit.runner.simulation import MEGABYTE, Asked, Simulation

from puna.wire import Failed

ALL_KINDS = [*KINDS, *LIBRARY_KINDS]

# Of the pool, for the views of attention: small, so that small pools are tight.
PADDING = 16


@pytest.fixture
def no_foresight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly no room is reckoned for answers, so that requests must give way often."""
    monkeypatch.setattr("puna.runner.scheduling.admission.MIN_ANSWER", 8)
    monkeypatch.setattr("puna.runner.scheduling.admission.N_ANSWERS", 1)


@pytest.fixture(autouse=True)
def small_host_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it is full now and then, and its books are soon checked."""
    monkeypatch.setattr("puna.runner.prefixes.host_cache.MAX_ENTRIES", 12)


@pytest.fixture
def small_views(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("puna.kvcache.views.PADDING", PADDING)
    monkeypatch.setattr("puna.kvcache.causal.PADDING", PADDING)


def tokens(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(1, N_VOCAB) for _ in range(count)]


class Load:
    """Requests of all kinds at any time: of their own, with a common beginning, or the next turn of a conversation."""

    def __init__(self, simulation: Simulation, chance: random.Random) -> None:
        self.simulation = simulation
        self.chance = chance
        self.beginnings = [tokens(chance, chance.randint(20, 100)) for _ in range(3)]

    def prompt(self) -> list[int]:
        chance, n_ctx = self.chance, self.simulation.limits.n_ctx
        own = tokens(chance, int(2 ** chance.uniform(0, 7)))
        kind = chance.random()
        ended = [a for a in self.simulation.asked if a.end is not None and a.end.__class__.__name__ == "Done"]
        if kind < 0.3 and ended:
            begun = chance.choice(ended).done.tokens
        elif kind < 0.7:
            begun = chance.choice(self.beginnings)
        else:
            begun = []
        prompt = [*begun, *own]
        return prompt if len(prompt) < n_ctx else own

    def ask(self, **fields: Any) -> Asked:
        n_predict = self.chance.choice([0, 1, 3, 10, 30, 60, 200])
        return self.simulation.ask(self.prompt(), n_predict, **fields)


def n_steps_at_most(asked: Asked, n_ctx: int) -> int:
    """Steps in which the oldest computes at least a token, in each or when it is its turn; shifts compute a context again."""
    n_written = asked.request.n_generated
    n_shifts = n_written // max(n_ctx // 4, 1) + 1 if asked.shift else 0
    return 2 * (len(asked.prompt) + n_written + n_shifts * n_ctx + 2)


@pytest.mark.usefixtures("small_views", "no_foresight")
@pytest.mark.parametrize("seed", first(1, range(4)))
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_everyone_is_answered_as_if_alone_and_in_bounded_time(kind: str, seed: int) -> None:
    chance = random.Random(f"{kind} {seed}")
    n_ctx = chance.choice([160, 256])
    simulation = Simulation(
        kind,
        n_ctx=n_ctx,
        n_pool=chance.choice([n_ctx, n_ctx + 64, 2 * n_ctx]),
        n_parallel=chance.choice([2, 4]),
        n_batch=chance.choice([4, 16, 64]),
        host_cache_bytes=seed % 2 * MEGABYTE,
    )
    load = Load(simulation, chance)
    for _ in range(60):
        asked = load.ask(shift=chance.random() < 0.5, ignore_eos=False)
        if chance.random() < 0.15:
            cancelled = chance.choice([*simulation.asked[-5:], asked])
            cancelled.is_cancelled = True
            cancelled.handle.cancel()
        if chance.random() < 0.05:
            fail_next_step(simulation)
        if chance.random() < 0.1:
            spoil(simulation, chance)
        for _ in range(chance.choice([0, 0, 1, 4, 20])):
            simulation.turn()
    simulation.run()
    simulation.check_answers()
    for asked in simulation.asked:
        passing = [a for a in simulation.asked if a.arrived >= asked.arrived and a.request.order < asked.request.order]
        bound = sum(n_steps_at_most(a, n_ctx) for a in (*asked.older, *passing, asked))
        assert asked.ended - asked.arrived <= bound
    assert simulation.slots.n_free == simulation.loaded.n_parallel


def fail_next_step(simulation: Simulation) -> None:
    """As when the library reports an error: whoever is in the step is told."""

    def fail(batch: Any) -> None:
        simulation.model.on_step = lambda _batch: None
        for asked in simulation.asked:
            if asked.request.slot in batch.sequences and asked.end is None and asked.request in simulation.running:
                asked.is_unlucky = True
        raise RuntimeError("this step fails")

    simulation.model.on_step = fail


def spoil(simulation: Simulation, chance: random.Random) -> None:
    """From somewhere on, the rows of a running request are NaN; nobody else must see them, now or later."""
    unspoilt = [a for a in simulation.asked if a.end is None and a.request in simulation.running]
    if unspoilt:
        asked = chance.choice(unspoilt)
        asked.spoilt_from, asked.is_unlucky = asked.request.n_computed + chance.randint(0, 20), True


TIGHT = [*((kind, False) for kind in ALL_KINDS), *((kind, True) for kind in reversed(ALL_KINDS))]


@pytest.mark.usefixtures("small_views")
@pytest.mark.parametrize("case", first(len(ALL_KINDS) + 2, TIGHT), ids=lambda case: f"{case[0]}-{'host_cache' * case[1]}")
def test_a_tight_pool_computes_little_more_than_one_without_limit(case: tuple[str, bool]) -> None:
    """Where each of the requests fits. Of those that have a beginning in common some come at once and some later."""
    kind, has_host_cache = case
    n_computed = []
    for n_pool in (256, 8 * 256):  # all that eight sequences can hold
        total = 0
        for seed in range(2):
            chance = random.Random(f"{kind} {seed}")
            simulation = Simulation(
                kind, n_ctx=256, n_pool=n_pool, n_batch=32, n_parallel=4, host_cache_bytes=has_host_cache * MEGABYTE
            )
            for _ in range(10):
                beginning = tokens(chance, chance.randint(0, 100))
                for _ in range(chance.choice([1, 1, 2, 4])):
                    simulation.ask([*beginning, *tokens(chance, chance.randint(1, 60))], chance.randint(1, 60))
                for _ in range(chance.randint(0, 8)):
                    simulation.turn()
            simulation.run()
            simulation.check_answers()
            total += simulation.n_computed
        n_computed.append(total)
    assert n_computed[0] <= 1.1 * n_computed[1]


def test_copies_are_not_made_of_room_that_running_requests_need() -> None:
    """Four prompts of 957 tokens, of which 903 are the same, and answers of 100: by copies 4,224 cells, shared 1,515."""
    chance = random.Random(3)
    simulation = Simulation(n_ctx=2048, n_pool=2048, n_parallel=4)
    beginning = tokens(chance, 903)
    for _ in range(4):
        simulation.ask([*beginning, *tokens(chance, 54)], 100, ignore_eos=True)
    simulation.run()
    simulation.check_answers()
    assert simulation.n_pauses == 0
    assert simulation.n_computed == 903 + 4 * (54 + 99)
    assert simulation.model.n_steps <= 110


def test_copies_become_one_before_anybody_gives_way() -> None:
    """There is room for copies when they are made, and none when the answers have grown."""
    chance = random.Random(4)
    simulation = Simulation(n_ctx=2048, n_pool=2048, n_parallel=2)
    beginning = tokens(chance, 500)
    for _ in range(2):
        simulation.ask([*beginning, *tokens(chance, 10)], 700, ignore_eos=True)
    simulation.run(lambda: len(simulation.running) == 2)
    simulation.run()
    simulation.check_answers()
    assert simulation.n_pauses == 0
    assert simulation.n_computed == 500 + 2 * (10 + 699)


def test_prompts_that_cannot_end_beside_others_wait_for_them() -> None:
    """Eight prompts of 700 tokens with answers of 100 in a pool of 1,024, which holds one of them."""
    chance = random.Random(5)
    simulation = Simulation(n_ctx=1024, n_pool=1024, n_parallel=4)
    for _ in range(8):
        simulation.ask(tokens(chance, 700), 100, ignore_eos=True)
    simulation.run()
    simulation.check_answers()
    assert (simulation.n_pauses, simulation.n_computed) == (0, 8 * 799)


@pytest.mark.usefixtures("small_views")
@pytest.mark.parametrize("kind", ["full", "windows and full"])
def test_nobody_is_started_while_one_who_gave_way_waits_for_room(kind: str) -> None:
    """An answer grows until another request must give way, while short ones come without end."""
    chance = random.Random(6)
    simulation = Simulation(kind, n_ctx=1024, n_pool=1024, n_parallel=4, n_batch=64)
    simulation.ask(tokens(chance, 30), 900, ignore_eos=True)
    simulation.run(lambda: simulation.model.n_steps > 50)
    long = simulation.ask(tokens(chance, 400), 500, ignore_eos=True)
    n_younger = 0
    while long.end is None:
        while len(simulation.engine.loop.queue._waiting) < 2:
            simulation.ask(tokens(chance, 30), 30, ignore_eos=True)
        paused = [r for r in simulation.running if r.is_paused]
        before = len(simulation.asked) - len(simulation.engine.loop.queue._waiting)
        simulation.turn()
        n_younger += bool(paused) * (len(simulation.asked) - len(simulation.engine.loop.queue._waiting) - before)
        assert simulation.model.n_steps < 2000, "it starves"
    assert simulation.n_pauses > 0
    assert n_younger == 0


@pytest.mark.usefixtures("small_views")
@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("spoilt_from", [70, 130, 199, 205], ids=["first step", "later step", "last row", "answer"])
def test_what_was_computed_with_nan_is_never_used_again(kind: str, spoilt_from: int) -> None:
    """The same prompt again and prompts that begin like it: beside it, right after it, and after its slot was taken."""
    chance = random.Random(7)
    simulation = Simulation(kind, n_ctx=512, n_parallel=3, n_batch=64, host_cache_bytes=MEGABYTE)
    prompt = tokens(chance, 200)
    broken = simulation.ask(prompt, 20, ignore_eos=True)
    broken.spoilt_from, broken.is_unlucky = spoilt_from, True
    beside = [simulation.ask([*prompt[:n], 5, 6], 10, ignore_eos=True) for n in (65, 100, 190, 200)]
    simulation.run(lambda: broken.end is not None)
    assert isinstance(broken.end, Failed)
    assert "NaN" in broken.end.error
    assert broken.request.n_generated == (0 if spoilt_from < 200 else spoilt_from - 199)
    again = simulation.ask(prompt, 10, ignore_eos=True)
    simulation.run()
    others = [simulation.ask(tokens(chance, 200), 2) for _ in range(6)]
    simulation.run()
    last = simulation.ask(prompt, 10, ignore_eos=True)
    simulation.run()
    simulation.check_answers()
    assert all(asked.end is not None for asked in (*beside, again, *others, last))


def test_a_prompt_that_gives_nan_ends_at_once() -> None:
    chance = random.Random(8)
    simulation = Simulation(n_ctx=1024, n_batch=64)
    broken = simulation.ask(tokens(chance, 900), 5)
    broken.spoilt_from = 100
    simulation.run()
    assert simulation.model.n_steps == 2


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_used_cells_are_those_that_hold_a_token(kind: str) -> None:
    simulation = Simulation(kind, n_ctx=2000, n_pool=4100, n_parallel=2, n_batch=64)
    is_bounded = "full" in kind
    health = simulation.engine.health()
    assert (health.cache_cells >= 4100, health.cache_used) == (is_bounded, 0)
    simulation.ask(tokens(random.Random(9), 1500), 1)
    simulation.run()
    assert simulation.engine.health().cache_used == 1500 * is_bounded
    while simulation.slots.evict():
        pass
    assert simulation.engine.health().cache_used == 0


@pytest.mark.parametrize("n_batch", [1, 2, 3, 4])
def test_those_who_write_take_turns_in_a_small_batch_and_prompts_keep_room(n_batch: int) -> None:
    """Four places; nobody gets less than the others by more than a token, and a prompt advances beside three who write."""
    chance = random.Random(10)
    simulation = Simulation(n_ctx=1024, n_parallel=4, n_batch=n_batch)
    writing = [simulation.ask(tokens(chance, 4), 500, ignore_eos=True) for _ in range(3)]
    simulation.run(lambda: all(a.request.n_generated for a in writing))
    before = [a.request.n_generated for a in writing]
    late = simulation.ask(tokens(chance, 10), 500, ignore_eos=True)
    simulation.run(lambda: late.request.n_generated > 0, turns=50)
    for _ in range(40):
        simulation.turn()
    written = [a.request.n_generated - n for a, n in zip(writing, before, strict=True)]
    assert max(written) - min(written) <= 1
    assert late.request.n_generated >= 40 * n_batch // 4
    assert sum(written) + late.request.n_generated >= 40 * n_batch


@pytest.mark.parametrize("has_host_cache", [False, True], ids=["", "host_cache"])
def test_who_gives_way_loses_no_more_than_the_others_need(has_host_cache: bool) -> None:
    """Two grow to 2,230 tokens in a pool of 2,048: the later one gives up its last ones, and they come back or are computed."""
    chance = random.Random(11)
    simulation = Simulation(n_ctx=2048, n_pool=2048, n_parallel=2, host_cache_bytes=64 * MEGABYTE * has_host_cache)
    first = simulation.ask(tokens(chance, 30), 1000, ignore_eos=True)
    simulation.run(lambda: first.request.n_generated > 100)
    simulation.ask(tokens(chance, 400), 800, ignore_eos=True)
    simulation.run()
    simulation.check_answers()
    n_short = 1030 + 1200 - 2048
    assert simulation.n_pauses == 1
    lost = simulation.n_computed - (1029 + 1199)
    assert lost == 0 if has_host_cache else 0 < lost <= n_short
