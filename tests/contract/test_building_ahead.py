"""Graphs built while another step is computed: the answers are those of an engine that waits, whatever happens meanwhile."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from puna.kvcache.batch import batch
from puna.runner.engine import Engine
from puna.runner.step.forward import Forward
from puna.wire import Done, Failed, LoadOptions, LoadRequest, SamplingOptions
from tests.contract.test_engine import Answer, check_integrity, started
from tests.models.table import ROWS
from tests.patience import PATIENCE_S
from tests.puna_engine import PunaEngine
from tests.tiny import write_llama

TEXT = "once upon a time there was a little girl who liked to read books and the sea and the sun "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("tiny") / "model.gguf", seed=3, n_layers=2)


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    engine = started(model, build_ahead=True, n_ctx=1024)
    yield engine
    engine.close()


def forward_of(engine: Engine) -> Forward:
    assert isinstance(engine.loop.model.forward, Forward)
    return engine.loop.model.forward


def said(answers: list[Answer]) -> list[str]:
    for answer in answers:
        answer.done()
    return [answer.text for answer in answers]


def test_a_long_answer_never_waits_for_a_graph_after_the_first(engine: Engine, model: Path) -> None:
    plain = started(model, build_ahead=False, n_ctx=1024)
    try:
        expected = said([Answer(plain, TEXT, n_predict=600)])
        builds = forward_of(plain).n_builds
        assert said([Answer(engine, TEXT, n_predict=600)]) == expected
        # The prompt's graph and the first of decoding are waited for at most; those at every 256 cells are not.
        assert builds >= 4
        assert forward_of(engine).n_builds + forward_of(engine).n_used_ahead == builds
        assert forward_of(engine).n_used_ahead >= builds - 2
    finally:
        plain.close()


def test_a_prompt_in_chunks_has_its_graphs_ready(model: Path) -> None:
    engine = started(model, build_ahead=True, n_ctx=1024, n_batch=64)
    try:
        said([Answer(engine, TEXT * 25, n_predict=2)])
        assert forward_of(engine).n_used_ahead > forward_of(engine).n_builds
    finally:
        engine.close()


@pytest.mark.parametrize("row", ["llama", "gemma3", "lfm2", "qwen3next"])
def test_requests_that_come_go_and_are_cancelled_in_the_middle_of_steps_change_nothing(row: str, tmp_path: Path) -> None:
    """What was expected is wrong at every turn here: others join, end, are cancelled, shift or give way."""
    path = ROWS[row].write(tmp_path / "m.gguf", seed=4)
    texts: dict[bool, list[str]] = {}
    for ahead in (False, True):
        engine = started(path, build_ahead=ahead, n_ctx=192, n_parallel=3, n_pool=420, n_batch=64)
        try:
            texts[ahead] = churn(engine)
            check_integrity(engine)
            assert forward_of(engine).builds_ahead is ahead
        finally:
            engine.close()
    assert texts[True] == texts[False]


def churn(engine: Engine) -> list[str]:
    """Answers of requests that are not cancelled; greedy, so that they depend on nothing but their prompts."""
    draw = random.Random(7)
    kept: list[Answer] = []
    for _ in range(30):
        words = TEXT.split()
        draw.shuffle(words)
        prompt = " ".join(words[: draw.randint(1, 18)])
        answer = Canceling(engine, prompt, n_predict=draw.randint(1, 40), cancel_after=draw.choice([None, None, 1, 5, 17]))
        if answer.cancel_after is None:
            kept.append(answer)
        else:
            answer.ended.wait(PATIENCE_S)
    return said(kept)


class Canceling(Answer):
    """Cancels itself after so many pieces of text: on the engine's thread, in the middle of a step."""

    def __init__(self, engine: Engine, prompt: str, *, cancel_after: int | None, **fields: Any) -> None:
        self.cancel_after = cancel_after
        self._n_pieces = 0
        self._has_handle = threading.Event()
        super().__init__(engine, prompt, sampling=SamplingOptions(temperature=0.0), **fields)
        self._has_handle.set()

    def _take(self, reply: Any) -> None:
        super()._take(reply)
        self._n_pieces += 1
        if self.cancel_after is not None and self._n_pieces >= self.cancel_after and not isinstance(reply, Done | Failed):
            self._has_handle.wait(PATIENCE_S)
            self.handle.cancel()


def test_a_graph_that_was_expected_and_never_came_leaves_the_current_one_as_it_was(model: Path) -> None:
    ids = list(range(5, 205)) * 2
    with PunaEngine(model, n_ctx=512) as plain, PunaEngine(model, n_ctx=512, builds_ahead=True) as engine:
        for each in (plain, engine):
            each.decode(ids[:254], range(254), [0] * 254, [253])
            each.decode([7], [254], [0], [0])
        expected = plain.decode([8], [255], [0], [0]).copy()
        # The next would need a wider view, and a graph for that is built; but the sequence goes back by one.
        engine.forward.expect(batch([0], [256], [0], [0]))
        engine.decode([9], [255], [0], [0])
        assert engine.forward._ahead is not None
        engine.forget(0, 255)
        n_builds = engine.forward.n_builds
        assert np.array_equal(engine.decode([8], [255], [0], [0]), expected)
        assert engine.forward.n_builds == n_builds
        assert engine.forward._ahead is None


def test_fit_counts_the_working_memory_twice(model: Path) -> None:
    replies = []
    for ahead in (False, True):
        engine = Engine(model)
        options = LoadOptions(n_ctx=256, n_parallel=2, n_threads=1, build_ahead=ahead)
        fitted = engine.load(LoadRequest(operation="fit", options=options))
        taken = engine.load(LoadRequest(operation="commit", options=options))
        assert fitted.memory is not None
        assert taken.memory is not None
        assert [d.graph for d in fitted.memory.devices] == [d.graph for d in taken.memory.devices]
        replies.append(sum(d.graph for d in taken.memory.devices))
        engine.close()
    assert replies[1] == 2 * replies[0] > 0


def test_the_builder_ends_with_the_engine(model: Path) -> None:
    before = set(threading.enumerate())
    engine = started(model, build_ahead=True)
    said([Answer(engine, TEXT, n_predict=5)])
    assert set(threading.enumerate()) - before
    engine.close()
    assert set(threading.enumerate()) <= before
