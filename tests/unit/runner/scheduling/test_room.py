"""What the slots do with a real cache when its pool is short."""

from __future__ import annotations

from typing import Any

from tests.unit.runner.seeing import KINDS, make_cache

from puna.kvcache.batch import batch
from puna.kvcache.cache import Limits
from puna.runner.prefixes.slots import Slots


def make(n_pool: int = 1024) -> tuple[Slots, Any]:
    cache = make_cache(KINDS["full"], Limits(4, 512, 512, n_pool))
    return Slots(cache, 2, 4), cache


def run(slots: Slots, cache: Any, tokens: list[int], *, ends: bool = True, n_needed: int = 0) -> tuple[int, int]:
    """The request computes its prompt; its sequence, and how much was there."""
    sequence, length = slots.acquire(tokens, n_needed=n_needed)
    n = len(tokens) - length
    cache.start_forward(batch([0] * n, range(length, len(tokens)), [sequence] * n, []))
    slots.record(sequence, tokens, len(tokens))
    if ends:
        slots.release(sequence)
    slots.check_integrity()
    cache.check_integrity()
    return sequence, length


def test_a_prefix_is_copied_only_beside_what_running_requests_may_need() -> None:
    for n_needed, n_free in ((524, 1024 - 200 - 30 - 100 - 200), (525, 1024 - 200 - 30 - 100)):
        slots, cache = make()
        tokens = list(range(200))
        run(slots, cache, tokens, ends=False)
        run(slots, cache, list(range(1000, 1030)))  # idle: would leave for what is needed, but not for a copy
        assert run(slots, cache, [*tokens, *range(2000, 2100)], ends=False, n_needed=n_needed)[1] == 200
        assert cache.n_free == n_free


def test_an_idle_prefix_that_running_requests_read_is_not_evicted_in_vain() -> None:
    slots, cache = make()
    tokens = list(range(500))
    run(slots, cache, tokens)
    run(slots, cache, [*tokens[:200], *range(1000, 1200)], ends=False, n_needed=1024)
    assert slots.evict(), "three hundred of its tokens are its own"
    idle, length = run(slots, cache, [*tokens[:200], 8], n_needed=1024)
    assert length == 200
    cache.remove(idle, 200)
    slots.replace(idle, tokens[:200], 200)
    assert not slots.evict()
    assert cache.length(idle) == 200


def test_idle_prefixes_that_wait_for_a_prompt_go_last() -> None:
    slots, cache = make()
    first, _ = run(slots, cache, list(range(100)))
    second, _ = run(slots, cache, list(range(1000, 1100)))
    queue = [list(range(50)), list(range(5000, 5100))]
    assert slots.holders(queue) == {first}
    assert slots.evict(slots.holders(queue))
    assert (cache.length(first), cache.length(second)) == (100, 0)


def test_what_could_be_had_counts_what_idle_sequences_share_only_with_each_other() -> None:
    slots, cache = make()
    run(slots, cache, list(range(200)))
    run(slots, cache, [*range(200), *range(1000, 1250)], n_needed=1024)
    run(slots, cache, list(range(2000, 2100)), ends=False)
    assert cache.n_free == 1024 - 450 - 100
    assert slots.n_spare() == 450
    assert slots.n_spare((), 0, 150) == 300


def test_a_sequence_gives_up_no_more_than_is_short() -> None:
    slots, cache = make()
    sequence, _ = run(slots, cache, list(range(400)), ends=False)
    assert slots.shrink(sequence, 100) == 300 == cache.length(sequence)
    assert slots.regain(sequence, list(range(400))) == 300
