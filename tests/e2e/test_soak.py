"""Many requests of every kind, at once and in a row: each has one end, and nothing is left of them.

In small what ``python -m bench.load.soak`` does in large.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import uvloop
from bench.load import soak
from bench.load.contenders import Limits
from bench.load.prompts import Prompts
from bench.load.rows import Target, cancels, clients, long_prompt, shared_prefix
from bench.load.sample import Sample
from bench.load.soak import Place

from tests.thorough import first
from tests.tiny import write_llama

LIMITS = Limits(n_ctx=512, n_slots=4, n_threads=1)
N_REQUESTS = 180

Start = Callable[[Path, Limits], AbstractContextManager[Place]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", n_ctx=2048, n_layers=1)


@pytest.mark.parametrize("start", first(1, [soak.server, soak.runner]), ids=["server", "runner"])
def test_every_request_has_one_end_and_leaves_nothing(start: Start, model: Path) -> None:
    with start(model, LIMITS) as place:
        outcome = uvloop.run(soak.soak(place, N_REQUESTS, n_clients=10))
        assert outcome.problems == [], place.contender.last_words()
    assert outcome.ends.total() == N_REQUESTS
    assert {"stop", "length", "left", "refused"} == set(outcome.ends), "not every kind of request was there"
    assert len(outcome.resident_bytes) == 3


def test_the_soak_sees_a_runner_that_dies(model: Path) -> None:
    with soak.runner(model, LIMITS) as place:

        async def kill() -> soak.Outcome:
            asyncio.get_running_loop().call_later(0.3, place.process.kill)
            return await soak.soak(place, 5000, n_clients=10)

        outcome = asyncio.run(kill())
    assert any("cannot connect" in problem for problem in outcome.problems)
    assert "does not tell its health" in outcome.problems[-1]


def test_the_rows_of_the_serving_benchmark(model: Path) -> None:
    """Each measures something, on a server that answers all."""
    with soak.server(model, LIMITS) as place:
        target = Target(place.contender)

        async def measure() -> dict[str, Sample]:
            rows = {
                "clients": clients(3, 6, n_words=10, n_tokens=8),
                "prefix": shared_prefix(6, n_shared_words=60, n_own_words=5, n_tokens=4),
                "long": long_prompt(2, 100, n_stream_words=3),
                "cancel": cancels(8, share=0.5, within_s=0.01, n_tokens=40),
            }
            return {name: await row(target, Prompts(name)) for name, row in rows.items()}

        samples = uvloop.run(measure())
    assert [sample.problems for sample in samples.values()] == [[]] * 4
    plain, prefix, long, cancel = (samples[name].figures() for name in ("clients", "prefix", "long", "cancel"))
    assert (plain["answers"], samples["clients"].n_tokens) == (6, 48)
    assert 0 < plain["first_token_p50_s"] <= plain["first_token_p95_s"] < plain["wall_s"]
    assert prefix["computed_prompt_tokens"] < prefix["prompt_tokens"]
    assert long["gap_max_s"] >= long["gap_p50_s"]  # which is 0 where texts come several at a time
    assert long["chunks"] >= 1
    assert long["stall_max_s"] > 0
    assert cancel["answers"] + cancel["left"] == 8
