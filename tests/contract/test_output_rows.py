"""A task may ask for none, one or several rows of a step, in both engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from puna.gguf.reader import GGUFFile
from puna.runner.engine import Engine
from puna.runner.loading import engines
from puna.runner.scheduling.task import Part
from puna.runner.scheduling.workload import Rows
from puna.runner.step.compute import compute
from puna.runner.tasks.completion import Completion
from puna.runner.tasks.generation import Generation
from puna.wire import LoadOptions, LoadRequest
from tests.contract.greedy import is_exact, is_greedy
from tests.contract.test_engine import PROMPTS, Answer, started
from tests.patience import wait_until
from tests.tiny import write_llama

N_TOKENS = (7, 1, 12, 5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module", params=[True, False], ids=["puna", "libllama"])
def engine(request: pytest.FixtureRequest, model: Path) -> Iterator[Engine]:
    """With memory for as many rows of each sequence as a batch has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "OUTPUTS_PER_SEQUENCE", 32)
        engine = started(model, request.param, n_batch=32)
    yield engine
    engine.close()


@dataclass
class Asking:
    slot: int
    tokens: list[int]
    rows: range
    images = ()
    n_looked_at = 0

    def output_rows(self, begin: int, n_tokens: int) -> range:
        assert (begin, n_tokens) == (0, len(self.tokens))
        return self.rows


def step(engine: Engine, asked: list[range]) -> list[Rows]:
    """One step over prompts of N_TOKENS, of which nothing stays in the cache."""
    tasks: list[Any] = [Asking(slot, [slot + 3 + i for i in range(N_TOKENS[slot])], rows) for slot, rows in enumerate(asked)]
    model = engine.loop.model
    found = compute(model.forward, [Part(task, 0, len(task.tokens)) for task in tasks])
    assert found is not None
    kept = [rows.copy() for rows in found]
    for task in tasks:
        model.cache.remove(task.slot, 0)
    return kept


def test_each_task_gets_the_rows_that_it_asks_for(engine: Engine) -> None:
    every = step(engine, [range(n) for n in N_TOKENS])
    assert [rows.shape for rows in every] == [(n, engine.loop.model.n_vocab) for n in N_TOKENS]
    for asked in (
        [range(6, 7), range(1), range(11, 12), range(4, 5)],
        [range(0), range(0), range(8, 12), range(2, 5)],
        [range(0), range(1), range(0), range(1)],
        [range(0)] * 4,
    ):
        for found, rows, whole in zip(step(engine, asked), asked, every, strict=True):
            np.testing.assert_allclose(found, whole[rows.start : rows.stop], rtol=1e-3, atol=1e-3 * np.abs(whole).max())


def test_answers_are_the_same_where_every_row_of_a_prompt_is_asked_for(
    engine: Engine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As probabilities of a prompt's tokens need them: in steps of all sizes, for who computes a prompt and who writes."""
    alone = [Answer(engine, prompt * 3, n_predict=12) for prompt in PROMPTS]
    assert [answer.done().eval_count for answer in alone] == [12] * len(PROMPTS)
    n_rows: list[int] = []
    accept = Generation.accept

    def noted(self: Generation, parts: Any, outputs: Any) -> None:
        n_rows.extend(len(rows) for rows in outputs)
        assert [len(rows) for rows in outputs] == [part.n_tokens for part in parts]
        accept(self, parts, outputs)

    monkeypatch.setattr(Generation, "accept", noted)
    monkeypatch.setattr(Completion, "output_rows", lambda _self, _begin, n_tokens: range(n_tokens))
    wait_until(lambda: engine.health().active == 0)
    while engine.loop.scheduler.slots.evict():
        pass
    answers = [Answer(engine, prompt * 3, n_predict=12, return_tokens=True) for prompt in PROMPTS]
    assert [answer.done().eval_count for answer in answers] == [12] * len(PROMPTS)
    for before, answer in zip(alone, answers, strict=True):
        assert answer.text == before.text or (not is_exact(engine) and is_greedy(engine, model, answer.done()))
    assert max(n_rows) > 1 == min(n_rows)


@pytest.mark.parametrize("new_engine", [True, False], ids=["puna", "libllama"])
def test_memory_for_more_rows_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_engine: bool) -> None:
    path = write_llama(tmp_path / "tiny.gguf")
    options = LoadOptions(n_ctx=256, n_parallel=2, n_batch=32, n_threads=1)
    totals = []
    for n_rows in (1, 4):
        monkeypatch.setattr(engines, "OUTPUTS_PER_SEQUENCE", n_rows)
        reply = Engine(path, new_engine).load(LoadRequest(operation="fit", options=options))
        assert reply.memory is not None
        totals.append(reply.memory.total)
    with GGUFFile.open(path) as file:
        n_vocab = len(file.metadata.get("tokenizer.ggml.tokens", ()))
    assert totals[1] - totals[0] >= 4 * n_vocab * (16 - 4)
