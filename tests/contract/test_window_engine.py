"""The engine on a model whose layers forget: windows of 64 in homes of 256, contexts of 1024."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from puna.kvcache.layered import LayeredCache
from puna.runner.engine import Engine
from tests.contract.greedy import is_greedy
from tests.contract.test_engine import Answer, check_integrity, started
from tests.tiny import write_gemma3

STORY = "once upon a time there was a little girl who liked to read books and she said that the sea is blue " * 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gemma3(tmp_path_factory.mktemp("tiny") / "model.gguf", seed=3)


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    engine = started(model, n_ctx=1024, n_batch=64)
    yield engine
    cache = engine.loop.model.cache
    assert isinstance(cache, LayeredCache)
    check_integrity(engine)
    engine.close()


def said(engine: Engine, prompt: str, n_predict: int = 12) -> tuple[str, int, int]:
    """Text, tokens of the prompt, how many of them were cached."""
    answer = Answer(engine, prompt, n_predict=n_predict)
    done = answer.done()
    return answer.text, done.prompt_eval_count, done.cached_count


def test_a_conversation_goes_on_from_its_end(engine: Engine) -> None:
    _, first, _ = said(engine, STORY)
    _, longer, cached = said(engine, STORY + " and then")
    assert longer > first > 256
    assert cached == first


def test_the_same_prompt_again_goes_back_over_a_short_answer(engine: Engine) -> None:
    text, n, _ = said(engine, STORY)
    assert said(engine, STORY) == (text, n, n - 1)


def test_what_was_forgotten_is_computed_again(engine: Engine) -> None:
    alone, *_ = said(engine, STORY[:200])
    said(engine, STORY, 300)
    for _ in range(8):  # every other slot is taken by something else
        said(engine, "x" + STORY[:20])
    again, _, cached = said(engine, STORY[:200])
    assert again == alone
    assert cached <= 1  # the token that begins every prompt


def test_a_chat_goes_on_from_where_it_departs_from_the_one_before(model: Path) -> None:
    """A long system prompt, and chats that follow it: only what is new is computed, and what is said is as likely."""
    system, chats = STORY * 3, ["a fox " * 400, "the river " * 150, "one two three " * 110]
    engine = started(model, n_ctx=2048, n_parallel=2, n_batch=256, host_cache_bytes=64 << 20)
    try:
        n_system = len(engine.tokenize(system, True))
        assert n_system > 900
        answers = [Answer(engine, system + chat, n_predict=8, return_tokens=True).done() for chat in (*chats, chats[0])]
        assert min(done.prompt_eval_count - n_system for done in answers) >= 600
        assert min(done.cached_count for done in answers[1:]) >= n_system - 2
        assert answers[-1].cached_count == answers[-1].prompt_eval_count - 1
        assert engine.health().host_cache_bytes > 0
        check_integrity(engine)
        assert all(is_greedy(engine, model, done) for done in answers)
    finally:
        engine.close()


def test_what_windows_forgot_stays_within_its_bound(model: Path) -> None:
    engine = started(model, n_ctx=2048, n_parallel=2, n_batch=256, host_cache_bytes=1 << 20)
    try:
        for word in ("fox", "dog", "sun", "sea", "river", "girl"):
            said(engine, f"the {word} and " * 400, 4)
            assert 0 < engine.health().host_cache_bytes <= 1 << 20
        check_integrity(engine)
    finally:
        engine.close()


def test_prompts_with_a_common_beginning_say_what_each_says_alone(model: Path) -> None:
    prompts = [STORY + ending for ending in ("the sun", "the river", "eight", "a fox")]
    texts = []
    for n_parallel in (1, 4):
        engine = started(model, n_ctx=1024, n_parallel=n_parallel, n_batch=64)
        answers = [Answer(engine, prompt) for prompt in prompts]
        cached = [a.done().cached_count for a in answers]
        assert sum(c > 256 for c in cached) == 3
        texts.append([a.text for a in answers])
        engine.close()
    assert texts[0] == texts[1]


def test_a_full_context_shifts(model: Path) -> None:
    engine = started(model, n_ctx=512, n_batch=32)
    answers = [Answer(engine, f"the {word} runs", n_predict=900) for word in ("fox", "dog", "girl")]
    assert [a.done().eval_count for a in answers] == [900] * 3
    check_integrity(engine)
    engine.close()


def test_a_short_pool_is_no_trouble_for_windows(model: Path) -> None:
    engine = started(model, n_ctx=512, n_parallel=3, n_pool=600, n_batch=64)
    answers = [Answer(engine, f"the {word} runs", n_predict=300) for word in ("fox", "dog", "girl", "sun")]
    assert [a.done().eval_count for a in answers] == [300] * 4
    check_integrity(engine)
    engine.close()
