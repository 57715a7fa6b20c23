"""Who starts, in which sequence, with how much of its prompt: as if every sequence were compared with every prompt."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from puna.kvcache.cache import UNLIMITED, resume_point
from puna.runner.prefixes.held import Slot
from puna.runner.prefixes.key import Element
from puna.runner.prefixes.slots import MIN_COPY_GAIN, Slots
from puna.runner.prefixes.tree import Items, PrefixTree
from puna.runner.scheduling.admission import MIN_SHARED, QUEUE_WINDOW, next_to_start, pause

N_SEQUENCES, N_PARALLEL = 5, 3


class TokenCache:
    """Has each sequence's tokens themselves, so that what is resumed can be compared with what was asked for."""

    n_cells, n_free = 0, UNLIMITED

    def __init__(self) -> None:
        self.rows: list[list[int]] = [[] for _ in range(N_SEQUENCES)]

    def can_resume(self, sequence: int, position: int) -> bool:
        return position <= len(self.rows[sequence])

    def remove(self, sequence: int, begin: int, end: int | None = None, *, n_positions: int = 0) -> None:
        del self.rows[sequence][begin:end]

    def length(self, sequence: int) -> int:
        return len(self.rows[sequence])

    def n_freed(self, sequences: Collection[int], kept_by: int = -1, n_kept: int = 0) -> int:
        return 0

    def copy_prefix(self, source: int, target: int, length: int, *, by_reference: bool = False) -> None:
        assert source != target
        self.rows[target] = self.rows[source][:length]

    def share_prefix(self, source: int, target: int, length: int) -> None:
        assert self.rows[source][:length] == self.rows[target][:length]


class WindowCache(TokenCache):
    """Has forgotten what is far behind: a sequence goes on near its end only."""

    def can_resume(self, sequence: int, position: int) -> bool:
        n = len(self.rows[sequence])
        return position == 0 or n - 12 <= position <= n


class CheckpointedCache(TokenCache):
    """Goes on after every tenth token only."""

    def prepare_restore(self, sequence: int, position: int) -> int:
        return min(position, len(self.rows[sequence])) // 10 * 10


CACHES: list[type[TokenCache]] = [TokenCache, WindowCache, CheckpointedCache]


@dataclass
class Asked:
    """What admission sees of a request."""

    tokens: list[int]
    n_prompt: int
    n_computed: int = 0
    slot: int = -1
    order: int = 0
    is_paused: bool = False
    is_done: bool = False
    is_resumable: bool = True
    n_to_write: int = 0


def asked(tokens: Sequence[int]) -> Asked:
    return Asked(list(tokens), len(tokens))


def alike(a: Items, b: Items) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class OneByOne:
    """The rules, over a copy of the slots, with each prompt compared with each of them."""

    def __init__(self, slots: Slots, cache: TokenCache) -> None:
        self.slots: list[Slot] = copy.deepcopy(slots.slots)
        self.cache: Any = copy.deepcopy(cache)

    def reusable(self, slot: Slot, tokens: list[int]) -> int:
        shared = alike(slot.tokens[: slot.length], tokens)
        return resume_point(self.cache, slot.sequence, shared) if shared else 0

    def cached(self, tokens: list[int]) -> int:
        return max(self.reusable(slot, tokens) for slot in self.slots)

    def acquire(self, tokens: list[int]) -> tuple[int, int]:
        idle = [s for s in self.slots if not s.is_busy]
        shared = [self.reusable(s, tokens) for s in self.slots]
        most = max(shared)
        idle.sort(key=lambda s: (s.length > 0, s.last_used))
        best = max(idle, key=lambda s: shared[s.sequence])
        if 2 * shared[best.sequence] < best.length or most >= shared[best.sequence] + MIN_COPY_GAIN:
            only = [i for i, n in enumerate(shared) if n == most] if most >= MIN_COPY_GAIN else []
            best = next((s for s in idle if only != [s.sequence]), idle[0])
        length = shared[best.sequence]
        if most >= length + MIN_COPY_GAIN:
            length = most
            self.cache.copy_prefix(shared.index(most), best.sequence, length)
        return best.sequence, resume_point(self.cache, best.sequence, min(length, len(tokens) - 1))

    def next_to_start(self, waiting: list[Asked], running: list[Asked]) -> Asked | None:
        for request in waiting:
            soon = max((soon_shared(request, other) for other in running), default=0)
            if soon < MIN_SHARED or soon < self.cached(request.tokens) + MIN_SHARED:
                return request
        return None


def soon_shared(request: Asked, other: Asked) -> int:
    if other.n_computed >= other.n_prompt or other.is_done or other.is_paused:
        return 0
    shared = alike(other.tokens[: other.n_prompt], request.tokens)
    return shared if shared > other.n_computed else 0


def choose(waiting: list[Asked], running: list[Asked], slots: Slots) -> Asked | None:
    requests: Any = waiting
    others: Any = running
    chosen: Any = next_to_start(requests, others, slots)
    assert chosen is None or isinstance(chosen, Asked)
    return chosen


# Prompts are made of these, so that long beginnings are common and end anywhere.
PARTS = [[1] * 9, [1] * 5 + [2] * 6, [2] * 30, [1, 2] * 8, [1]]
# Of images whose rows are all the same token.
PARTS += [[Element(1, source=(digest, row)) for row in range(12)] for digest in ("cat", "dog")]
PROMPTS = st.lists(st.sampled_from(PARTS), min_size=1, max_size=8).map(lambda parts: [t for part in parts for t in part])
WHICH = st.integers(0, N_PARALLEL - 1)


class AnyOrder(RuleBasedStateMachine):
    """Requests come, compute, write, shift, give way and end; idle prefixes are forgotten."""

    @initialize(cache=st.sampled_from(CACHES))
    def start(self, cache: type[TokenCache]) -> None:
        self.cache = cache()
        books: Any = self.cache
        self.slots = Slots(books, N_PARALLEL, N_SEQUENCES)
        self.running: list[Asked] = []

    @rule(prompt=PROMPTS)
    def arrive(self, prompt: list[int]) -> None:
        if not self.slots.n_free:
            return
        expected = OneByOne(self.slots, self.cache)
        assert self.slots.cached(prompt) == expected.cached(prompt)
        request = asked(prompt)
        request.slot, request.n_computed = self.slots.acquire(request.tokens)
        assert (request.slot, request.n_computed) == expected.acquire(prompt)
        assert self.cache.rows[request.slot] == prompt[: request.n_computed]
        self.running.append(request)

    @rule(which=WHICH, begin=st.integers(0, 60), prompt=PROMPTS)
    def arrive_with_what_another_began_with(self, which: int, begin: int, prompt: list[int]) -> None:
        self.arrive([*self.slots.slots[which].tokens[:begin], *prompt])

    @rule(counts=st.lists(st.integers(0, 40), min_size=N_PARALLEL, max_size=N_PARALLEL), token=st.integers(1, 2))
    def step(self, counts: list[int], token: int) -> None:
        for request, count in zip(self.running, counts, strict=False):
            if request.is_paused:
                continue
            end = min(request.n_computed + count, len(request.tokens))
            self.cache.rows[request.slot] += request.tokens[request.n_computed : end]
            request.n_computed = end
            if count and end == len(request.tokens):
                request.tokens.append(token)
        self._record()

    def _record(self) -> None:
        for request in self.running:
            self.slots.record(request.slot, request.tokens, request.n_computed)

    @rule(which=WHICH, begin=st.integers(0, 20), count=st.integers(1, 20), moves=st.booleans())
    def shift(self, which: int, begin: int, count: int, moves: bool) -> None:
        """As the engine does when a context is full: the list loses its middle, then the cache, or what follows as well."""
        request = next(iter(self.running[which:]), None)
        if request is None or request.is_paused or request.n_computed <= begin + count:
            return
        del request.tokens[begin : begin + count]
        if moves:
            self.cache.remove(request.slot, begin, begin + count)
            request.n_computed -= count
        else:
            books: Any = self.cache
            request.n_computed = resume_point(books, request.slot, begin)
            self.cache.remove(request.slot, request.n_computed)
        self.slots.replace(request.slot, request.tokens, request.n_computed)

    @rule(which=WHICH)
    def give_way_or_go_on(self, which: int) -> None:
        for request in self.running[which : which + 1]:
            if request.is_paused:
                request.is_paused = False
                request.n_computed = self.slots.regain(request.slot, request.tokens)
                assert self.cache.rows[request.slot] == request.tokens[: request.n_computed]
            elif request.n_computed < len(request.tokens):
                who: Any = request
                pause(who, self.slots)
        self._record()

    @rule(which=WHICH, n_short=st.integers(1, 60))
    def lose_some(self, which: int, n_short: int) -> None:
        for request in self.running[which : which + 1]:
            if request.is_paused and request.n_computed:
                n_before = request.n_computed
                request.n_computed = self.slots.shrink(request.slot, n_short)
                assert request.n_computed == self.cache.length(request.slot) < n_before

    @rule(also_busy=st.booleans())
    def deduplicate(self, also_busy: bool) -> None:
        before = copy.deepcopy(self.cache.rows)
        self.slots.deduplicate(also_busy=also_busy)
        assert self.cache.rows == before

    @rule(which=WHICH)
    def end(self, which: int) -> None:
        for request in self.running[which : which + 1]:
            self.cache.remove(request.slot, request.n_computed)
            self.slots.release(request.slot)
            self.running.remove(request)

    @rule()
    def evict(self) -> None:
        idle = [slot for slot in self.slots.slots if not slot.is_busy and slot.length]
        assert self.slots.evict() == bool(idle)
        if idle:
            assert self.slots.slots[min(idle, key=lambda s: s.last_used).sequence].length == 0

    @rule()
    def start_afresh(self) -> None:
        self.running.clear()
        self.slots.start_afresh()
        assert self.slots.n_free == N_PARALLEL

    @rule(prompts=st.lists(PROMPTS, max_size=4), which=WHICH, begin=st.integers(0, 60))
    def ask(self, prompts: list[list[int]], which: int, begin: int) -> None:
        prompts += [[*request.tokens[:begin], *prompt] for request in self.running for prompt in prompts[:1]]
        expected = OneByOne(self.slots, self.cache)
        for prompt in prompts:
            assert self.slots.cached(prompt) == expected.cached(prompt)
        waiting = [asked(prompt) for prompt in prompts]
        assert choose(waiting, self.running, self.slots) is expected.next_to_start(waiting, self.running)

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "slots"):
            self.slots.check_integrity()
            for slot in self.slots.slots:
                assert self.cache.rows[slot.sequence] == slot.tokens[: slot.length]


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=40)


def slots_with(*running: Asked) -> Slots:
    cache: Any = TokenCache()
    slots = Slots(cache, N_PARALLEL, N_SEQUENCES)
    for request in running:
        request.slot, _ = slots.acquire(request.tokens)
    return slots


def test_who_begins_like_one_that_is_being_computed_waits_and_others_pass() -> None:
    first = asked(range(100))
    slots = slots_with(first)
    alike, other = asked([*range(60), 7, 7]), asked([7] * 60)
    assert choose([alike, other], [first], slots) is other
    assert choose([alike], [first], slots) is None
    first.n_computed = 100
    assert choose([alike, other], [first], slots) is alike


def test_what_is_computed_already_is_not_waited_for() -> None:
    first = asked(range(100))
    slots = slots_with(first)
    first.n_computed = 60
    slots.record(first.slot, first.tokens, 60)
    assert choose([asked([*range(60), 7, 7])], [first], slots) is not None
    assert choose([asked([*range(60 + MIN_SHARED), 7, 7])], [first], slots) is None


def test_only_a_prompt_is_waited_for_and_not_the_answer_to_it() -> None:
    """One that gave way computes its answer once more behind the prompt; that comes step by step."""
    first = asked(range(100))
    first.n_prompt = 40
    slots = slots_with(first)
    first.n_computed = 36
    slots.record(first.slot, first.tokens, 36)
    follower = asked(range(90))
    assert choose([follower], [first], slots) is None
    cache: Any = slots._cache
    cache.rows[first.slot] = first.tokens[:36]
    assert choose([follower], [first], slots) is follower


@pytest.mark.parametrize("state", ["is_paused", "is_done"])
def test_nobody_waits_for_one_that_does_not_compute(state: str) -> None:
    first = asked(range(100))
    slots = slots_with(first)
    setattr(first, state, True)
    follower = asked(range(90))
    assert choose([follower], [first], slots) is follower


def test_of_a_long_queue_only_the_first_are_looked_at() -> None:
    first = asked(range(100))
    slots = slots_with(first)
    alike = [asked([*range(90), i]) for i in range(QUEUE_WINDOW)]
    assert choose([*alike[1:], other := asked([7] * 60)], [first], slots) is other
    assert choose([*alike, asked([7] * 60)], [first], slots) is None


def test_prompts_that_differ_from_all_that_run_are_compared_with_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many sequences there are: their items are not looked at, only their first ones are known."""
    running = [asked(range(1000 * i, 1000 * i + 900)) for i in range(1, N_PARALLEL + 1)]
    slots = slots_with(*running)
    monkeypatch.setattr("puna.runner.prefixes.tree.common_prefix", lambda *_: pytest.fail("lists were compared"))
    monkeypatch.setattr(PrefixTree, "shared", lambda *_: pytest.fail("every sequence was asked"))
    other = asked([7] * 900)
    assert choose([other], running, slots) is other
