"""More conversations than the cache has sequences, on real models: each goes on from all it had computed, with the same text."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from puna.runner.engine import Engine
from puna.wire import Done
from tests.contract.greedy import is_greedy
from tests.contract.test_engine import Answer, check_integrity, faults_after_steps, started
from tests.models.lfm2 import write_lfm2
from tests.models.qwen3next import write_qwen3next
from tests.patience import wait_until
from tests.thorough import first
from tests.tiny import write_gemma3, write_llama

WRITERS: dict[str, Callable[..., Path]] = {
    "llama": write_llama,
    "gemma3": write_gemma3,
    "lfm2": write_lfm2,
    "qwen3next": write_qwen3next,
}
WORDS = ("sea", "sky", "fox", "dog", "sun", "river")
BYTES = 64 << 20


@pytest.fixture(scope="module", params=WRITERS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WRITERS[request.param](tmp_path_factory.mktemp("tiny") / "model.gguf")


@contextmanager
def checked(model: Path, **options: Any) -> Iterator[Engine]:
    """Two sequences; what the books say is checked after each step and at the end."""
    engine = started(model, **{"n_ctx": 1024, "n_parallel": 1, "n_batch": 128, **options})
    faults = faults_after_steps(engine)
    try:
        yield engine
        check_integrity(engine)
        assert not faults, faults[0]
        assert engine.health().host_cache_bytes <= options.get("host_cache_bytes", 0)
    finally:
        engine.close()


def turns(engine: Engine, n_turns: int = 3) -> dict[str, list[Done]]:
    """Each conversation says its next turn when all others have said theirs."""
    said: dict[str, list[Done]] = {word: [] for word in WORDS}
    for turn in range(n_turns):
        for word, before in said.items():
            context = before[-1].tokens if before else []
            prompt = f" and then the {word} said to the {turn} " * 4 if turn else f"{word} " * 100
            before.append(Answer(engine, prompt, context=context, return_tokens=True).done())
    return said


def test_every_conversation_goes_on_from_all_it_had_computed(model: Path) -> None:
    with checked(model, host_cache_bytes=BYTES) as engine:
        said = turns(engine)
        health = engine.health()
        assert health.host_cache_entries >= len(WORDS) - 2
        assert health.host_cache_bytes > 0
        for word, dones in said.items():
            for turn, (before, done) in enumerate(pairwise(dones)):
                n_before = len(before.tokens)
                assert done.cached_count == n_before - 1, f"{word}, turn {turn + 1}"  # the last token was not computed
                assert is_greedy(engine, model, done), f"{word}, turn {turn + 1}"


def test_without_an_host_cache_it_is_computed_again(model: Path) -> None:
    with checked(model) as engine:
        for dones in turns(engine).values():
            assert all(done.cached_count <= 2 for done in dones)  # the token that begins every prompt, perhaps a space
        assert (engine.health().host_cache_bytes, engine.health().host_cache_entries) == (0, 0)


def test_the_texts_are_those_without_an_host_cache(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model.gguf", seed=3)
    texts = []
    for host_cache_bytes in (BYTES, 0):
        with checked(model, host_cache_bytes=host_cache_bytes) as engine:
            texts.append({word: [done.tokens for done in dones] for word, dones in turns(engine).items()})
    assert texts[0] == texts[1]


@pytest.mark.parametrize("kv_cache_type", ["q8_0", "q4_0"])
def test_quantised_rows_come_back_as_they_were(tmp_path: Path, kv_cache_type: str) -> None:
    model = write_llama(tmp_path / "model.gguf", seed=3)
    with checked(model, host_cache_bytes=BYTES, kv_cache_type=kv_cache_type) as engine:
        for dones in turns(engine, 2).values():
            assert dones[1].cached_count == len(dones[0].tokens) - 1


def test_a_small_host_cache_keeps_those_that_were_there_last(tmp_path: Path) -> None:
    """Of six conversations it has room for two or three; two are in the cache."""
    model = write_llama(tmp_path / "model.gguf", n_layers=2)
    with checked(model, host_cache_bytes=BYTES) as engine:
        turns(engine, 1)
        health = engine.health()
        n_bytes = health.host_cache_bytes // health.host_cache_entries
    with checked(model, host_cache_bytes=4 * n_bytes + n_bytes // 2) as engine:
        said = turns(engine, 1)
        assert 3 <= engine.health().host_cache_entries <= 4
        last = WORDS[-1]
        for word in (last, *WORDS[2:4]):
            done = Answer(engine, " and then", context=said[word][-1].tokens, n_predict=2).done()
            assert done.cached_count == len(said[word][-1].tokens) - 1, word


def test_a_beginning_in_the_host_cache_serves_all_who_share_it(model: Path) -> None:
    with checked(model, host_cache_bytes=BYTES, n_parallel=2) as engine:
        story = "once upon a time there was a little girl who liked to read books and she said that the sea is blue " * 4
        first = Answer(engine, story, n_predict=4).done()
        for word in WORDS:
            Answer(engine, f"{word} " * 100, n_predict=2).done()
        answers = [Answer(engine, f"{story} the {word}", n_predict=8, return_tokens=True) for word in WORDS]
        for answer in answers:
            done = answer.done()
            assert done.cached_count >= first.prompt_eval_count - 10
            assert is_greedy(engine, model, done)


@pytest.mark.parametrize("seed", first(1, range(4)))
def test_any_order_of_arrivals_and_cancels_in_a_short_pool(model: Path, seed: int) -> None:
    """Conversations come back, several at once or one after another, whole or in part; what they say is always likely."""
    chance = random.Random(seed)
    limits = {"n_ctx": 512, "n_parallel": 2, "n_pool": chance.choice([512, 700, 1024]), "n_batch": chance.choice([32, 128])}
    with checked(model, host_cache_bytes=chance.choice([2 << 20, BYTES]), **limits) as engine:
        contexts: list[list[int]] = [[] for _ in range(6)]
        for _ in range(15):
            chosen = chance.sample(range(6), chance.randint(1, 4))
            answers = []
            for i in chosen:
                prompt = " ".join(chance.choices(WORDS, k=chance.randint(1, 60)))
                kept = contexts[i][: chance.randint(0, len(contexts[i]))] if chance.random() < 0.3 else contexts[i]
                context = kept if len(kept) < 300 else []
                answers.append(Answer(engine, prompt, context=context, n_predict=chance.randint(1, 30), return_tokens=True))
            for answer in answers:
                if chance.random() < 0.2:
                    answer.handle.cancel()
            for i, answer in zip(chosen, answers, strict=True):
                done = answer.done()
                if done.reason != "cancelled":
                    contexts[i] = done.tokens
        wait_until(lambda: engine.health().active == 0)
        for i, tokens in enumerate(contexts):
            done = Answer(engine, " and then", context=tokens[:400], n_predict=20, return_tokens=True).done()
            assert is_greedy(engine, model, done), i
