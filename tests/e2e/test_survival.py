"""Runners that die, in every phase of their life, and servers that do: who is told what, and what is left.

The chaos test does in small what ``python -m bench.load.chaos`` does in large.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from bench.load import chaos

from tests.patience import PATIENCE_S, wait_until
from tests.tiny import write_llama

N_REQUESTS = 200
# Ten times the context is allowed: with 2,048 such a model ends its answer after four seconds, in the middle of a test.
N_CTX = 1 << 16
ENDLESS = {"temperature": 0, "ignore_eos": True, "num_ctx": N_CTX, "num_predict": 1_000_000}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [write_llama(folder / f"tiny{seed}.gguf", seed=seed, n_layers=1, n_ctx=N_CTX) for seed in range(4)]


@pytest.mark.thorough
def test_chaos(models: list[Path], tmp_path: Path) -> None:
    """Four models for two places, and a runner or the spare is killed once in a dozen requests."""
    with chaos.serving(tmp_path, OLLAMA_MAX_LOADED_MODELS="2") as server:
        outcome = asyncio.run(chaos.chaos(server, models, N_REQUESTS))
        problems = outcome.problems + chaos.stop(server, signal.SIGTERM)
        assert problems == [], server.log.read_text()[-5000:]
    assert outcome.ends.total() == N_REQUESTS
    assert set(outcome.ends) == {"answer", "error"}
    assert outcome.ends["answer"] > N_REQUESTS // 4
    assert outcome.kills.total() >= 5
    assert len(server.started) > 10


class Stream:
    """An endless answer that is read in a thread."""

    def __init__(self, url: str, model: Path) -> None:
        self.lines: list[dict[str, Any]] = []
        self.broke_off = False
        self._url = url
        self._body = {"model": str(model), "prompt": "the old fox", "options": ENDLESS}
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            with httpx.stream("POST", f"{self._url}/api/generate", json=self._body, timeout=PATIENCE_S) as response:
                rest = b""
                for data in response.iter_bytes():
                    *lines, rest = (rest + data).split(b"\n")
                    self.lines += map(json.loads, lines)
        except httpx.HTTPError:
            self.broke_off = True

    def wait_until_it_runs(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while len(self.lines) < 3:
            assert self._thread.is_alive(), self.lines
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def end(self) -> dict[str, Any]:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        return self.lines[-1] if self.lines else {}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_server(number: signal.Signals, models: list[Path], tmp_path: Path) -> None:
    """Neither runners that compute, nor the spare, nor a port: even when the server has no chance to say goodbye."""
    with chaos.serving(tmp_path) as server:
        streams = [Stream(server.url, model) for model in models[:2]]
        for stream in streams:
            stream.wait_until_it_runs()
        deadline = time.monotonic() + PATIENCE_S
        while len(server.look()) < 3:  # two models and the spare
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert chaos.stop(server, number) == []
        ends = [stream.end() for stream in streams]
    if number == signal.SIGTERM:
        assert all(end.get("error") for end in ends), ends
    else:
        assert all(stream.broke_off for stream in streams)


def spare_bytes(url: str) -> float:
    metrics = httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text
    (line,) = [line for line in metrics.splitlines() if line.startswith("puna_spare_runner_bytes ")]
    return float(line.split()[1])


def test_the_spare_is_counted_and_can_be_switched_off(models: list[Path], tmp_path: Path) -> None:
    for is_on in (True, False):
        folder = tmp_path / str(is_on)
        folder.mkdir()
        with chaos.serving(folder, PUNA_WARM_SPARE=str(int(is_on))) as server:
            stream = Stream(server.url, models[0])
            stream.wait_until_it_runs()
            deadline = time.monotonic() + (PATIENCE_S if is_on else 3)  # the next spare comes some time after a load
            while time.monotonic() < deadline and (len(server.look()) < 2 or spare_bytes(server.url) < 10 << 20):
                time.sleep(0.1)
            assert (len(server.look()) - 1, spare_bytes(server.url) > 10 << 20) == ((1, True) if is_on else (0, False))
            assert chaos.stop(server, signal.SIGTERM) == []
            stream.end()


def test_one_models_crash_is_nobody_elses(models: list[Path], tmp_path: Path) -> None:
    with chaos.serving(tmp_path, PUNA_WARM_SPARE="0") as server:
        bystander = Stream(server.url, models[0])
        bystander.wait_until_it_runs()
        (innocent,) = server.look()
        for _ in range(2):
            victim = Stream(server.url, models[1])
            victim.wait_until_it_runs()
            (guilty,) = [process for process in server.look() if process != innocent]
            guilty.send_signal(signal.SIGSEGV)
            assert "signal SIGSEGV" in victim.end()["error"]
            n_lines = len(bystander.lines)
            wait_until(lambda: len(bystander.lines) > n_lines)  # noqa: B023 - it is over before there is another number
        innocent.kill()
        assert "signal SIGKILL" in bystander.end()["error"]


SERVE = """
import os
from pathlib import Path
from puna.llm.launch import Backoff, Launcher
from puna.llm.runner import Runner
from puna.server.process.serve import serve
from puna.settings import load

async def start(path: Path) -> Runner:
    return await Runner.start([*{command!r}, "--model", str(path)], environ=os.environ)

launcher = Launcher(start=start)
launcher._backoff = Backoff(clock=lambda: 0.0)  # no pause is over before it has begun, however late the next request comes
serve(load(), launch=launcher.launch)
"""


@dataclass
class Deadly:
    """A server whose runners die as they are told to."""

    server: chaos.Server
    plan: Path

    def ask(self, model: Path) -> dict[str, Any]:
        body = {"model": str(model), "prompt": "the old fox is by the river", "options": {**ENDLESS, "num_predict": 4}}
        answer: dict[str, Any] = httpx.post(
            f"{self.server.url}/api/generate", json={**body, "stream": False}, timeout=PATIENCE_S
        ).json()
        return answer

    def crashes_in_a_row(self) -> list[int]:
        """At each load that had to wait for that; how long it waits is in tests/unit/llm/test_launch.py."""
        return [
            int(n) for n in re.findall(r"has crashed (\d+) times in a row.* it is started again in", self.server.log.read_text())
        ]

    def unload_all(self) -> None:
        for model in httpx.get(f"{self.server.url}/api/ps", timeout=PATIENCE_S).json()["models"]:
            httpx.post(f"{self.server.url}/api/generate", json={"model": model["name"], "keep_alive": 0}, timeout=PATIENCE_S)
        deadline = time.monotonic() + PATIENCE_S
        while self.server.look():
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.fixture(scope="module")
def deadly(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deadly]:
    folder = tmp_path_factory.mktemp("deadly")
    plan = folder / "plan"
    runner = [sys.executable, str(Path(__file__).with_name("dying_runner.py")), "--channel"]
    command = [sys.executable, "-c", SERVE.format(command=runner)]
    with chaos.serving(folder, command, DYING=str(plan)) as server:
        yield Deadly(server, plan)
        assert chaos.stop(server, signal.SIGTERM) == []


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("abort", r"unexpectedly stopped \(signal SIGABRT\): .*the tensor library gives up"),
        ("kill", r"unexpectedly stopped \(signal SIGKILL\)"),
        ("memory", r"Unable to allocate 1\.00 GiB"),
    ],
)
@pytest.mark.parametrize("phase", ["load", "prefill", "decode"])
def test_the_reason_reaches_the_client_and_the_next_request_is_served(
    phase: str, way: str, reason: str, deadly: Deadly, models: list[Path]
) -> None:
    model = models[0]
    deadly.unload_all()
    deadly.plan.write_text(f"{phase} {way}")
    answer = deadly.ask(model)
    assert not deadly.plan.exists()
    assert re.search(reason, answer.get("error", "")), answer
    assert deadly.ask(model)["done"] is True


def test_a_model_that_crashes_whenever_it_is_loaded_is_loaded_ever_more_rarely(deadly: Deadly, models: list[Path]) -> None:
    """A client that asks again at once would else keep the machine busy with loading."""
    model = models[1]
    deadly.unload_all()
    before = len(deadly.crashes_in_a_row())
    for _ in range(4):
        deadly.plan.write_text("load kill")
        assert "signal SIGKILL" in deadly.ask(model)["error"]
    assert deadly.crashes_in_a_row()[before:] == [2, 3]
    assert deadly.ask(model)["done"] is True
    assert deadly.crashes_in_a_row()[before:] == [2, 3, 4]
    deadly.plan.write_text("load kill")
    deadly.unload_all()
    assert "signal SIGKILL" in deadly.ask(model)["error"]
    assert len(deadly.crashes_in_a_row()) == before + 3, "an answer in between ends the row"
