"""Prompts of different people in one engine: none finds, or waits for, what another has computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from puna.runner.engine import Engine
from puna.wire import SamplingOptions
from tests.contract.test_engine import Answer, check_integrity, started
from tests.tiny import write_gemma3, write_llama

PROMPT = "the lazy dog sleeps under the old tree while the fox runs to the river " * 4


@pytest.fixture(scope="module", params=[write_llama, write_gemma3], ids=["llama", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = request.param(tmp_path_factory.mktemp("tiny") / "model.gguf", n_ctx=1024)
    return path


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    engine = started(model, n_ctx=1024, n_parallel=2, n_batch=64, host_cache_bytes=64 << 20)
    yield engine
    check_integrity(engine)
    engine.close()


def cached(engine: Engine, salt: str, prompt: str = PROMPT, **fields: object) -> int:
    return Answer(engine, prompt, salt=salt, n_predict=4, **fields).done().cached_count


def test_only_the_own_prefix_is_found(engine: Engine) -> None:
    n_prompt = Answer(engine, PROMPT, salt="a", n_predict=4).done().prompt_eval_count
    assert cached(engine, "b") == 0
    assert cached(engine, "") == 0
    assert cached(engine, "a") == n_prompt - 1
    assert cached(engine, "b") == n_prompt - 1
    assert cached(engine, "c") == 0


def test_nor_in_the_host_cache(engine: Engine) -> None:
    n_prompt = Answer(engine, PROMPT, salt="a", n_predict=4).done().prompt_eval_count
    for number in range(12):  # more than there are sequences
        cached(engine, "other", f"{number} {PROMPT[number:]}")
    assert engine.health().host_cache_entries > 0
    assert cached(engine, "b") == 0
    assert cached(engine, "a") >= n_prompt // 2


def test_nobody_waits_for_a_prompt_of_somebody_else(engine: Engine) -> None:
    long = PROMPT * 3
    for salts, expected in ((("a", "b"), False), (("c", "c"), True)):
        both = [Answer(engine, long, salt=salt, n_predict=4) for salt in salts]
        found = [answer.done().cached_count for answer in both]
        assert (max(found) > 0) is expected, salts


def test_the_salt_stays_when_the_context_shifts(tmp_path: Path) -> None:
    engine = started(write_llama(tmp_path / "model.gguf", n_ctx=1024), n_ctx=1024, n_parallel=2, n_batch=64)
    fields = {"n_keep": 0, "ignore_eos": True, "return_tokens": True}
    done = Answer(engine, PROMPT, salt="a", n_predict=1000, **fields).done()
    assert len(done.tokens) > 1024, "it has shifted"
    check_integrity(engine)
    end = done.tokens[512:612]  # half a context has gone, so the slot begins here
    assert [cached(engine, salt, "x", context=end) for salt in ("", "b", "a")] == [0, 0, len(end)]
    engine.close()


def test_the_salt_changes_no_answer(engine: Engine) -> None:
    sampling = SamplingOptions(temperature=0, repeat_penalty=1.3, repeat_last_n=-1)
    answers = [Answer(engine, PROMPT, salt=salt, n_predict=30, sampling=sampling) for salt in ("", "a", "b")]
    for answer in answers:
        answer.done()
    assert len({answer.text for answer in answers}) == 1
