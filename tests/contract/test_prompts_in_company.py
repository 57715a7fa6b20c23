"""How soon a prompt is answered beside others that take long, on the engine: counted in steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from puna.runner.engine import Engine
from puna.runner.tasks.completion import Completion
from tests.contract.test_engine import Answer, check_integrity, started
from tests.patience import PATIENCE_S, wait_until
from tests.tiny import write_llama

STORY = "a little girl who liked to read books and she said that reading is the best thing in the whole world "
LONG = STORY * 110
SHORT = "why is the sky blue and the sea"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("tiny") / "model.gguf", seed=3, n_layers=2, n_ctx=8192)


@pytest.fixture(params=[True, False], ids=["puna", "libllama"])
def engine(request: pytest.FixtureRequest, model: Path) -> Iterator[Engine]:
    engine = started(model, request.param, n_ctx=8192, n_parallel=8)
    yield engine
    check_integrity(engine)
    engine.close()


class Company:
    """A long prompt, beside some who decode, and short prompts that come when a part of it is computed."""

    def __init__(self, engine: Engine, n_decoding: int, n_short: int) -> None:
        self.silent_steps: Counter[str] = Counter()  # by prompt, with that in which the first token came
        self.short: list[Answer] = []
        self._engine, self._n_short = engine, n_short
        # Whoever comes after may not wait for a prefix of these.
        self.decoding = [Answer(engine, f"{i} {i} {i} is a number", n_predict=4000) for i in range(n_decoding)]
        wait_until(lambda: all(answer.text for answer in self.decoding))
        engine.after_step(self._note)
        self.long = Answer(engine, LONG, n_predict=4)

    def _note(self) -> None:
        for task in self._engine.loop.scheduler.running:
            if isinstance(task, Completion) and task.n_generated <= 1:
                self.silent_steps[task.wire.prompt] += 1
        if self.silent_steps[LONG] and not self.short:
            self.short = [Answer(self._engine, f"{chr(97 + i)} {SHORT}", n_predict=4) for i in range(self._n_short)]

    def end(self) -> None:
        assert self.long.done().eval_count == 4
        for answer in self.short:
            assert answer.done().eval_count == 4
        for answer in self.decoding:
            answer.handle.cancel()
            assert answer.ended.wait(PATIENCE_S)


def test_a_short_prompt_beside_a_long_one_gets_its_first_token_within_two_steps(engine: Engine) -> None:
    company = Company(engine, n_decoding=2, n_short=1)
    company.end()
    assert company.long.done().prompt_eval_count > 3000
    assert company.silent_steps[f"a {SHORT}"] <= 2
    assert company.silent_steps[LONG] > 6


def test_nor_does_it_wait_where_nobody_decodes(engine: Engine) -> None:
    company = Company(engine, n_decoding=0, n_short=3)
    company.end()
    assert max(company.silent_steps[f"{name} {SHORT}"] for name in "abc") == 1
