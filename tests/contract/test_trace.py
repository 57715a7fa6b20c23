"""A line for each step, as `puna runner --trace` writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from puna.runner.engine import Engine
from puna.wire import LoadOptions, LoadRequest
from tests.contract.test_engine import Answer
from tests.patience import wait_until
from tests.tiny import write_llama

N_CTX, N_PROMPT, N_PREDICT = 256, 40, 6


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "model.gguf", n_layers=1, n_embd=64, n_ff=64)


def started(model: Path, trace: Path | None) -> Engine:
    engine = Engine(model, trace=trace)
    assert engine.load(LoadRequest(options=LoadOptions(n_ctx=N_CTX, n_parallel=2, n_batch=32))).success
    wait_until(lambda: engine.health().status == "ready")
    return engine


def steps(trace: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in trace.read_text().splitlines()]


def test_each_step_has_its_line_with_what_was_computed_for_whom(model: Path, tmp_path: Path) -> None:
    trace = tmp_path / "steps.jsonl"
    engine = started(model, trace)
    prompt = "x" * N_PROMPT
    n_prompt = len(engine.tokenize(prompt, True))
    Answer(engine, prompt, n_predict=N_PREDICT).done()
    wait_until(lambda: engine.health().active == 0)
    written = steps(trace)
    assert len(written) == engine.health().steps
    engine.close()
    assert [line["step"] for line in written] == list(range(len(written)))
    parts = [part for line in written for part in line["parts"]]
    assert {part["slot"] for part in parts} == {parts[0]["slot"]}
    assert {part["prompt"] for part in parts} == {n_prompt}
    # Without a gap: each part begins where the one before ended, and all but the last token that was chosen are computed.
    ends = [part["begin"] + part["tokens"] for part in parts]
    assert [part["begin"] for part in parts] == [0, *ends[:-1]]
    assert ends[-1] == n_prompt + N_PREDICT - 1
    assert parts[-1]["generated"] == N_PREDICT
    assert all(line["tokens"] == sum(part["tokens"] for part in line["parts"]) <= 32 for line in written)
    assert all(line["ms"] > 0 and line["running"] == 1 and line["waiting"] == 0 for line in written)
    assert written[-1]["cells"] - written[-1]["free"] == ends[-1]


def test_a_prompt_that_was_computed_before_begins_behind_it(model: Path, tmp_path: Path) -> None:
    trace = tmp_path / "steps.jsonl"
    engine = started(model, trace)
    for _ in range(2):
        Answer(engine, "y" * N_PROMPT, n_predict=1).done()
    wait_until(lambda: engine.health().active == 0)
    engine.close()
    tasks = [part for line in steps(trace) for part in line["parts"]]
    assert next(part["begin"] for part in tasks if part["task"] == 1) == 0
    assert next(part["begin"] for part in tasks if part["task"] == 2) > 0


def test_a_full_disk_does_not_stop_the_engine(model: Path) -> None:
    engine = started(model, Path("/dev/full"))
    Answer(engine, "z", n_predict=3).done()
    assert engine.health().status == "ready"
    engine.close()


def test_a_file_that_cannot_be_written_is_said_at_once(model: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Engine(model, trace=tmp_path / "nowhere" / "steps.jsonl")
