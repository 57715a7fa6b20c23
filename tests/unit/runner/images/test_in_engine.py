"""Images through the real engine, slots and caches: what rows see, what is encoded how often, and who waits for whom."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.unit.runner.images.simulated import FakeEyes, FakeVision, SeeingSimulation, file, told
from tests.unit.runner.simulation import MEGABYTE

from puna.errors import BadRequest, ContextOverflow, UnsupportedModel
from puna.runner.images import kept
from puna.runner.images.in_sequence import position
from puna.runner.tasks.seeing import Seeing
from puna.vision.model import Prepared
from puna.wire import Done, Failed

CAT, DOG = file(3, 2, 1), file(2, 4, 2)

EYES = {
    "together": FakeVision(),
    "causal": FakeVision(is_causal=True),
    "axes": FakeVision(has_axes=True),
    "pieces": FakeVision(n_pieces=3),
}


@pytest.fixture(params=EYES)
def simulation(request: pytest.FixtureRequest) -> SeeingSimulation:
    known = EYES[request.param]
    vision = FakeVision(known.is_causal, known.has_axes, known.is_cross_attended, known.n_pieces)
    return SeeingSimulation(eyes=FakeEyes(vision))


def check(simulation: SeeingSimulation) -> None:
    for asked in simulation.asked:
        assert isinstance(asked.end, Done), asked.end
        if asked.end.reason != "cancelled":
            answer = simulation.alone(asked)
            assert told(asked) == (answer[:-1] if answer[-1] == 0 else answer)


@pytest.mark.parametrize(
    "parts",
    [[CAT], [CAT, 5, 6], [5, 6, CAT], [5, CAT, 6], [5, CAT, DOG, 6], [CAT, 7, CAT, 8, DOG], [5, CAT, CAT, 6]],
    ids=str,
)
def test_a_prompt_with_images_is_seen_as_it_is(simulation: SeeingSimulation, parts: list[Any]) -> None:
    simulation.show(parts)
    simulation.run()
    check(simulation)
    assert simulation.kept.n_encoded == len({part for part in parts if isinstance(part, bytes)})


@pytest.mark.parametrize("n_batch", [16, 64])
def test_many_users_with_images_at_once(simulation: SeeingSimulation, n_batch: int) -> None:
    chance = random.Random(n_batch)
    for _ in range(30):
        parts: list[int | bytes] = [chance.randrange(1, 100) for _ in range(chance.randint(1, 40))]
        for _ in range(chance.randint(0, 3)):
            parts.insert(chance.randint(0, len(parts)), file(3, 2, chance.randint(1, 4)))
        asked = simulation.show(parts, chance.choice([1, 5, 20]))
        if chance.random() < 0.2:
            asked.is_cancelled = True
            asked.handle.cancel()
        for _ in range(chance.choice([0, 1, 5])):
            simulation.turn()
    simulation.run()
    check(simulation)
    assert simulation.kept.n_encoded <= 4
    assert not any(image.n_holders for image in simulation.kept._images.values())


def test_an_image_that_two_users_bring_at_once_is_encoded_once() -> None:
    simulation = SeeingSimulation()
    simulation.show([5, CAT, 6])
    simulation.show([9, 9, CAT])
    simulation.show([8, DOG])
    simulation.run()
    check(simulation)
    assert (simulation.kept.n_encoded, simulation.kept.n_reused) == (2, 1)
    assert simulation.eyes.decoders.n_read == 2


def test_an_image_is_told_from_tokens_and_from_other_images() -> None:
    """Prompts that differ in nothing but an image find nothing of one another beyond it."""
    simulation = SeeingSimulation()
    first = [7] * 12
    for image in (CAT, file(3, 2, 3), CAT):
        simulation.show([*first, image, 8])
        simulation.run()
    cached = [asked.done.cached_count for asked in simulation.asked]
    assert cached == [0, 12, 12 + 9]
    check(simulation)
    assert simulation.kept.n_encoded == 2


def test_a_conversation_goes_on_behind_its_images_without_encoding_them_again() -> None:
    simulation = SeeingSimulation(image_cache_bytes=0)
    first = simulation.show([5, CAT, 6])
    simulation.run()
    simulation.show([5, CAT, 6, *told(first), 7, 7])
    simulation.run()
    assert simulation.asked[1].done.cached_count >= 11
    assert simulation.kept.n_encoded == 1
    assert simulation.eyes.encoder.n_layers_computed == 6
    check(simulation)


def test_an_image_that_is_kept_is_neither_read_nor_encoded_again() -> None:
    simulation = SeeingSimulation()
    for first in ([5], [6], [7]):
        simulation.show([*first, CAT])
        simulation.run()
    assert (simulation.kept.n_encoded, simulation.kept.n_reused) == (1, 2)
    assert simulation.eyes.decoders.n_read == 1
    check(simulation)


def test_what_is_kept_has_a_bound_and_goes_by_its_last_use() -> None:
    simulation = SeeingSimulation(image_cache_bytes=2 * 4 * 6)  # of six rows each, two
    for number in (1, 2, 1, 3, 1, 2):
        simulation.show([number + 10, file(3, 2, number)])
        simulation.run()
        assert simulation.kept.n_bytes <= 2 * 4 * 6
    assert simulation.kept.n_encoded == 4, "1, 2, 3, and 2 again"
    check(simulation)


def test_of_images_that_nobody_has_little_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what went, no list of elements is left; and of all together only so many tokens."""
    simulation = SeeingSimulation(image_cache_bytes=0)
    monkeypatch.setattr(kept, "MAX_KNOWN_TOKENS", 50)
    for number in range(10):
        simulation.show([number + 10, file(3, 2, number)])
        simulation.run()
        known = simulation.kept._images.values()
        assert not any(image.elements for image in known)
        assert 40 < sum(image.n_tokens for image in known) <= 50 or number < 4
    check(simulation)


def test_images_of_other_salts_are_not_found() -> None:
    simulation = SeeingSimulation()
    for salt in ("a", "b", "a"):
        simulation.show([5, CAT], salt=salt)
        simulation.run()
    assert simulation.kept.n_encoded == 2


def test_who_decodes_gets_a_token_in_every_turn_while_an_image_is_encoded() -> None:
    simulation = SeeingSimulation(token_gap_s=1e-9)  # no time at all: a layer a turn
    simulation.show([5, 6], 40, ignore_eos=True)
    simulation.run(until=lambda: bool(simulation.asked[0].text))
    simulation.show([7, CAT])
    encoder, counts = simulation.eyes.encoder, []
    while not simulation.kept.n_encoded:
        before, written = len(encoder.parts), len(simulation.asked[0].text.split())
        simulation.turn()
        counts.append((len(encoder.parts) - before, len(simulation.asked[0].text.split()) - written))
    assert counts == [(1, 1)] * 6
    simulation.run()


def test_without_anybody_who_waits_an_image_is_encoded_in_few_parts() -> None:
    simulation = SeeingSimulation()
    simulation.show([7, CAT])
    simulation.run()
    assert [(begin, end) for _, begin, end in simulation.eyes.encoder.parts] == [(0, 1), (1, 6)], "the first is a measurement"


def test_a_long_prompt_is_not_kept_waiting_for_the_images_of_others() -> None:
    """Between two of its steps they get as long as a step takes, or the least that they always get."""
    eyes = FakeEyes(FakeVision(is_causal=True))
    simulation = SeeingSimulation(eyes=eyes, n_batch=16, n_ctx=400, n_parallel=8, token_gap_s=0.2)
    turns, now, run = simulation.engine.loop.images, [0.0], eyes.encoder.run
    assert turns is not None
    turn = turns.turn
    turns.turn = lambda running, step_s, *, is_idle: turn(running, min(step_s, 0.01), is_idle=is_idle)  # type: ignore[method-assign]
    turns.encoding._clock = lambda: now[0]

    def slow(piece: Any, states: Any, begin: int, end: int) -> Any:
        now[0] += 0.02 * (end - begin)
        return run(piece, states, begin, end)

    eyes.encoder.run = slow  # type: ignore[method-assign]
    simulation.show([file(2, 2, number) for number in range(1, 40)], 1)
    reader = simulation.ask([99] * 160, 1)
    simulation.run(lambda: reader.request.n_computed > 0)
    began, n_steps = now[0], simulation.engine.loop.n_steps
    simulation.run(lambda: reader.end is not None)
    assert 0 < now[0] - began <= 0.06 * (simulation.engine.loop.n_steps - n_steps)
    simulation.run()
    check(simulation)


def test_text_before_an_image_is_computed_while_that_is_encoded() -> None:
    simulation = SeeingSimulation(n_batch=16, token_gap_s=1e-9)
    simulation.show([3], 60, ignore_eos=True)
    simulation.run(until=lambda: bool(simulation.asked[0].text))
    asked = simulation.show([*[7] * 20, CAT])
    simulation.turn()
    simulation.turn()
    assert 0 < asked.request.n_computed <= 20
    assert simulation.eyes.encoder.parts
    simulation.run()
    check(simulation)


def test_images_of_requests_that_are_cancelled_are_not_encoded() -> None:
    simulation = SeeingSimulation(token_gap_s=1e-9)
    simulation.show([5], 100, ignore_eos=True)
    simulation.run(until=lambda: bool(simulation.asked[0].text))
    asked = simulation.show([6, CAT])
    simulation.turn()
    n_parts = len(simulation.eyes.encoder.parts)
    assert 0 < n_parts < 6
    asked.is_cancelled = True
    asked.handle.cancel()
    waiting = simulation.show([7, DOG])
    waiting.is_cancelled = True
    waiting.handle.cancel()
    simulation.run()
    assert len(simulation.eyes.encoder.parts) == n_parts
    assert simulation.kept.n_encoded == 0
    check(simulation)


def test_an_image_that_another_still_wants_goes_on_when_the_first_is_cancelled() -> None:
    simulation = SeeingSimulation(token_gap_s=1e-9)
    simulation.show([5], 100, ignore_eos=True)
    simulation.run(until=lambda: bool(simulation.asked[0].text))
    first = simulation.show([6, CAT])
    simulation.show([7, CAT])
    simulation.turn()
    first.is_cancelled = True
    first.handle.cancel()
    simulation.run()
    assert simulation.eyes.encoder.n_layers_computed == 6
    check(simulation)


def test_an_engine_that_starts_afresh_begins_the_image_under_way_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = SeeingSimulation(token_gap_s=1e-9, image_cache_bytes=0)
    simulation.ask([5], 100, ignore_eos=True)
    simulation.run(until=lambda: bool(simulation.asked[0].text))
    simulation.show([6, CAT])
    simulation.turn()
    assert 0 < len(simulation.eyes.encoder.parts) < 6

    def out_of_step(_queue: Any) -> None:
        raise RuntimeError("out of step")

    with monkeypatch.context() as patched:
        patched.setattr(simulation.engine.loop.scheduler, "plan", out_of_step)
        simulation.engine.loop.turn()
    assert all(isinstance(asked.end, Failed) for asked in simulation.asked)
    again = simulation.show([6, CAT])
    simulation.run(lambda: again.end is not None)
    assert isinstance(again.end, Done), again.end


def test_an_encoder_that_fails_ends_those_who_wait_for_it_and_nobody_else() -> None:
    simulation = SeeingSimulation()

    def fail() -> None:
        raise RuntimeError("out of order")

    simulation.eyes.encoder.on_part = fail
    broken, sound = simulation.show([5, CAT]), simulation.show([5, 6])
    simulation.run()
    assert isinstance(broken.end, Failed)
    assert "out of order" in broken.end.error
    assert isinstance(sound.end, Done)
    simulation.eyes.encoder.on_part = lambda: None
    simulation.show([5, CAT])
    simulation.run()
    assert isinstance(simulation.asked[2].end, Done), "the next one tries again"


def test_a_bad_image_is_named_and_the_others_are_given_back() -> None:
    simulation = SeeingSimulation()
    for bad, why in ((file(3, 3, 201), "image 2: it is broken"), (file(31, 1, 3), "image 2: 31 is too wide")):
        with pytest.raises(BadRequest, match=why):
            simulation.show([5, CAT, bad])
    assert not any(image.n_holders for image in simulation.kept._images.values())


def test_an_image_larger_than_a_step_or_the_context_is_refused() -> None:
    simulation = SeeingSimulation(n_batch=16, n_ctx=128)
    with pytest.raises(BadRequest, match="image 1: 22 tokens of it must be computed at once, a step has 16 at most"):
        simulation.show([file(6, 3, 1)])
    causal = SeeingSimulation(n_batch=16, n_ctx=128, eyes=FakeEyes(FakeVision(is_causal=True)))
    causal.show([5, file(6, 3, 1)])
    causal.run()
    check(causal)
    with pytest.raises(BadRequest, match="image 2: it takes 133 tokens, the context has 128"):
        causal.show([5, CAT, file(10, 12, 1)])


def test_truncation_leaves_whole_images_out() -> None:
    simulation = SeeingSimulation(n_ctx=128)
    wide = [file(5, 4, number) for number in range(6)]  # 25 tokens each
    asked = simulation.show([9, 9, 9, 9, *[part for image in wide for part in (image, 5, 6)]], n_predict=4)
    request = asked.request
    assert [at.image.placed.tokens for at in request.images] == [request.images[0].image.placed.tokens] * len(request.images)
    assert request.n_truncated % 27 in (0, 25)
    assert request.n_prompt <= 128
    simulation.run()
    check(simulation)
    assert simulation.kept.n_encoded == len(request.images)
    with pytest.raises(ContextOverflow):
        simulation.show([*wide, 5], truncate=False)


@pytest.mark.parametrize("has_axes", [False, True])
def test_a_shift_drops_whole_images(has_axes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = SeeingSimulation(n_ctx=96, eyes=FakeEyes(FakeVision(has_axes=has_axes)))
    removed: list[tuple[int, int, int]] = []
    remove = simulation.cache.remove

    def noted(sequence: int, begin: int, end: int | None = None, *, n_positions: int = 0) -> None:
        if end is not None:
            removed.append((begin, end, n_positions))
        remove(sequence, begin, end)  # the model's keys are told by their order

    monkeypatch.setattr(simulation.cache, "remove", noted)
    asked = simulation.show([9, 9, 9, 9, *[3] * 30, CAT, *[4] * 10, DOG, 5], 100, shift=True, ignore_eos=True, n_keep=4)
    images = list(asked.request.images)
    before = [position(images, at.begin) for at in images]
    simulation.run()
    assert isinstance(asked.end, Done)
    assert removed
    begin, end, n_positions = removed[0]
    assert begin == 4
    assert not any(at.begin < end < at.end for at in images)
    dropped = [at for at in images if at.begin < end]
    assert dropped, "the first image stands where the cut comes"
    saved = sum(at.image.n_tokens - (at.image.placed.n_positions or at.image.n_tokens) for at in dropped)
    assert n_positions == end - begin - saved
    assert (saved > 0) == has_axes
    assert before[0] == 34


def test_pauses_and_tight_pools_with_images() -> None:
    """Who gives way computes its images again where they were lost, and is answered as if alone."""
    chance = random.Random(3)
    simulation = SeeingSimulation(
        n_ctx=160, n_pool=200, n_parallel=4, n_batch=32, host_cache_bytes=MEGABYTE, image_cache_bytes=100
    )
    for _ in range(25):
        parts: list[int | bytes] = [chance.randrange(1, 100) for _ in range(chance.randint(1, 60))]
        for _ in range(chance.randint(0, 2)):
            parts.insert(chance.randint(0, len(parts)), file(3, 2, chance.randint(1, 6)))
        simulation.show(parts, chance.choice([5, 30]), ignore_eos=False)
        for _ in range(chance.choice([0, 2, 8])):
            simulation.turn()
    simulation.run()
    check(simulation)


def test_pieces_that_were_not_kept_are_prepared_again() -> None:
    """Files of many images that wait at once take less than what the encoder takes of them."""
    simulation = SeeingSimulation(image_cache_bytes=0)
    for number in range(8):
        simulation.show([number + 1, file(4, 4, number)])
    assert any(image.pieces is None for image in simulation.kept._images.values())
    simulation.run()
    check(simulation)
    assert simulation.kept.n_encoded == 8
    assert simulation.eyes.decoders.n_read > 8


def test_images_that_nobody_has_leave_room_to_those_that_wait() -> None:
    simulation = SeeingSimulation(image_cache_bytes=3 * 4 * 16)
    for number in range(10):
        simulation.show([number + 1, file(4, 4, number)])
        simulation.run()
    check(simulation)
    assert simulation.eyes.decoders.n_read == 10, "none is prepared twice"


def test_who_waits_for_pieces_waits_for_few_later_images() -> None:
    """They are prepared again while other images are encoded."""
    simulation = SeeingSimulation(image_cache_bytes=3 * 4 * 16, n_parallel=8)
    asked = [simulation.show([number + 1, file(4, 4, number)], 1) for number in range(4)]
    late = asked[-1]
    assert late.request.images[0].image.pieces is None
    numbers = iter(range(10, 200))

    def another_comes() -> bool:
        number = next(numbers)
        simulation.show([number, file(1, 1, number)], 1)
        return late.end is not None

    simulation.run(another_comes, turns=50)
    simulation.run()
    check(simulation)


def test_who_waits_for_an_image_that_cannot_be_prepared_again_is_told_why() -> None:
    simulation = SeeingSimulation(image_cache_bytes=0)
    asked = [simulation.show([number + 1, file(4, 4, number)]) for number in range(8)]

    def prepare(_data: bytes) -> Prepared:
        raise RuntimeError("out of order")

    simulation.kept._prepare = prepare
    simulation.run()
    failed = [one.end for one in asked if isinstance(one.end, Failed)]
    assert len(failed) == 8 - simulation.kept.n_encoded > 0
    assert all("out of order" in end.error for end in failed)


def looking(**options: Any) -> SeeingSimulation:
    """Each row that is stored takes its time, which nothing else does."""
    simulation = SeeingSimulation(eyes=FakeEyes(FakeVision(is_cross_attended=True)), **options)
    turns = simulation.engine.loop.images
    assert turns is not None
    assert turns.storing is not None
    now = [0.0]
    turns.storing._clock = lambda: now[0]

    def spend(n: int) -> None:
        now[0] += ROW_S * n

    simulation.homes.on_part = spend
    return simulation


ROW_S = 0.01
TALL = file(10, 40, 3)


def test_who_decodes_never_waits_for_a_whole_image() -> None:
    """Between two tokens as many rows as there is time for; the request itself goes on when all are there."""
    simulation = looking(token_gap_s=0.2)
    reader = simulation.ask([1, 2, 3], 500, ignore_eos=True)
    simulation.run(lambda: reader.request.n_generated > 2)
    parts, n_generated = simulation.homes.parts, reader.request.n_generated
    asked = simulation.show([5, TALL, 6], 3)
    sums: list[int] = []
    while not asked.request.n_generated:
        before = len(parts)
        simulation.turn()
        sums.append(sum(n for _, n in parts[before:]))
    assert sum(sums) == 400
    assert max(sums) * ROW_S <= 0.2
    assert len([n for n in sums if n]) >= 400 * ROW_S / 0.2
    assert reader.request.n_generated - n_generated >= len(sums) - 1, "a token with every turn"
    asked.handle.cancel()
    reader.handle.cancel()
    simulation.run()


@pytest.mark.parametrize("follows", [False, True], ids=["the first image", "a later one"])
def test_who_is_cancelled_leaves_the_home_to_the_next(follows: bool) -> None:
    simulation = looking(token_gap_s=0.2, n_parallel=2)
    reader = simulation.ask([1, 2, 3], 2000, ignore_eos=True)
    simulation.run(lambda: reader.request.n_generated > 2)
    first: list[int | bytes] = [*range(5, 25), *([CAT] if follows else []), 6]
    asked = simulation.show([*first, TALL, 7], 3)
    rows = 6 if follows else 0
    simulation.run(lambda: rows < sum(n for _, n in simulation.homes.parts) < 300)
    asked.handle.cancel()
    simulation.run(lambda: asked.end is not None)
    again = simulation.show([*first, file(5, 5, 4), 7], 3)
    simulation.run(lambda: again.end is not None)
    assert again.done.cached_count >= 20, "what was computed before the image is there still"
    reader.handle.cancel()
    simulation.run()
    assert told(again) == [t for t in simulation.alone(again) if t]


def test_users_bring_images_that_are_looked_at_at_once() -> None:
    simulation = looking(n_parallel=4)
    asked = [simulation.show([number, file(3, 4, number), 6, 7, file(4, 2, number + 50), 8]) for number in range(1, 9)]
    simulation.run()
    check(simulation)
    assert len(asked) == 8
    assert sorted(s for step in simulation.homes.in_steps for s in step), "they come with steps"


def test_an_image_that_cannot_be_stored_fails_its_request_alone() -> None:
    simulation = looking()
    store = simulation.homes.store

    def broken(sequence: int, rows: Any, begin: int) -> bool:
        if len(rows) == 12:
            raise RuntimeError("out of order")
        return store(sequence, rows, begin)

    simulation.homes.store = broken  # type: ignore[method-assign]
    bad, good = simulation.show([5, file(3, 4, 1), 6]), simulation.show([5, DOG, 6])
    simulation.run()
    assert isinstance(bad.end, Failed)
    assert "out of order" in bad.end.error
    assert isinstance(good.end, Done)


def _bytes_of_rows(simulation: SeeingSimulation) -> int:
    return sum(image.rows.nbytes for image in simulation.kept._images.values() if image.rows is not None)


@pytest.mark.parametrize("is_looked_at", [True, False])
def test_a_request_keeps_no_images_that_it_is_past(is_looked_at: bool) -> None:
    """Beyond the bound there are the rows that somebody still needs; what another needs that waits is not encoded twice."""
    eyes = FakeEyes(FakeVision(is_cross_attended=is_looked_at))
    simulation = SeeingSimulation(eyes=eyes, n_ctx=1000, n_parallel=1, image_cache_bytes=2 * 4 * 30)
    parts: list[int | bytes] = []
    for number in range(1, 13):
        parts += [number, file(5, 6, number)]
    simulation.show([*parts, 7])
    last = simulation.show([50, file(5, 6, 1), 8])
    most = 0

    def look() -> bool:
        nonlocal most
        most = max(most, _bytes_of_rows(simulation))
        return last.end is not None

    simulation.run(look)
    check(simulation)
    assert simulation.kept.n_encoded == 12
    assert most <= 5 * 4 * 30


def test_images_that_are_looked_at_come_one_at_a_time() -> None:
    simulation = looking()
    simulation.show([5, CAT, 6, 7, DOG, 8])
    simulation.show([CAT, 9, 9])
    simulation.run()
    check(simulation)
    assert simulation.kept.n_encoded == 2


def test_what_stands_for_an_image_is_no_token_to_penalties_and_to_the_answers_memory() -> None:
    simulation = SeeingSimulation()
    asked = simulation.show([5, CAT, 6], 3)
    simulation.run()
    assert asked.done.tokens[:5] == [5, 120, 122, 121, 6]
    assert asked.done.prompt_eval_count == 11


def test_a_model_without_eyes_says_so() -> None:
    simulation = SeeingSimulation()
    generation: Any = simulation.engine.loop.workload
    generation._seeing = Seeing(64, blindness="the projector is of another kind")
    with pytest.raises(UnsupportedModel, match="of another kind"):
        simulation.show([5, CAT])
    simulation.ask([5, 6])
    simulation.run()
    assert isinstance(simulation.asked[-1].end, Done)


def test_only_a_marker_stands_for_an_image() -> None:
    simulation = SeeingSimulation()
    asked = simulation.show([5, CAT, 6])
    assert [at.begin for at in asked.request.images] == [1]
    tokens = simulation.engine.tokenize("5 <0> 6", True, ["<0>"])
    assert tokens == [5, 6]
    simulation.run()
