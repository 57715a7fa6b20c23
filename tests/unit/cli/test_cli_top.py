"""``puna top`` against a server whose runners follow a script, and its arithmetic."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.patience import PATIENCE_S
from tests.unit.cli.pty_driver import terminal
from tests.unit.server.apis.test_native import HI
from tests.unit.server.live import Live

from puna.cli.top import _narrower, rows_of, samples

BEFORE = """
puna_runner_tokens_total{model="a:latest"} 1000.0
puna_runner_answer_tokens_total{model="a:latest"} 100.0
puna_runner_steps_total{model="a:latest"} 50.0
"""
AFTER = """
puna_runner_tokens_total{model="a:latest"} 1700.0
puna_runner_answer_tokens_total{model="a:latest"} 300.0
puna_runner_steps_total{model="a:latest"} 60.0
puna_runner_requests_active{model="a:latest"} 3.0
puna_runner_requests_waiting{model="a:latest"} 1.0
puna_requests_waiting{model="a:latest"} 2.0
puna_prompt_tokens_total{model="a:latest"} 200.0
puna_prompt_tokens_cached_total{model="a:latest"} 50.0
puna_cache_cells{model="a:latest"} 4096.0
puna_cache_cells_used{model="a:latest"} 1024.0
puna_runner_tokens_total{model="other:latest"} 9.0
"""
MODEL = {"name": "a:latest", "model": "a:latest", "size": 10, "size_vram": 0}


def test_rates_are_what_came_since_the_last_look() -> None:
    (row,) = rows_of([MODEL], samples(BEFORE), samples(AFTER), 2.0)
    assert (row.answer_per_s, row.prompt_per_s, row.steps_per_s) == (100.0, 250.0, 5.0)
    assert (row.running, row.waiting, row.reused) == (3, 3, 0.25)
    assert (row.cache_cells, row.cache_used) == (4096, 1024)


def test_a_model_on_several_machines_is_one_row_since_its_numbers_are_sums() -> None:
    running = [{**MODEL, "node": "a", "size_vram": 10}, {**MODEL, "node": "b"}, {"name": "other:latest", "size": 1}]
    row, other = rows_of(running, samples(BEFORE), samples(AFTER), 2.0)
    assert (row.name, row.size, row.size_vram, row.answer_per_s) == ("a:latest", 20, 10, 100.0)
    assert (other.name, other.size) == ("other:latest", 1)


def test_a_runner_that_began_anew_has_no_rate() -> None:
    (row,) = rows_of([MODEL], samples(AFTER), samples(BEFORE), 1.0)
    assert (row.answer_per_s, row.steps_per_s) == (None, None)
    assert row.reused is None


@pytest.fixture
def live(tmp_path: Path) -> Live:
    server = Live(tmp_path)
    server.add("hello")
    return server


def environment(live: Live) -> dict[str, str]:
    return {**os.environ, "OLLAMA_HOST": live.url, "TERM": "xterm"}


def test_once_is_a_table_or_a_line_of_json(live: Live) -> None:
    with live.running():
        command = [sys.executable, "-m", "puna", "top", "--once", "--interval", "0.1"]

        def run(*more: str) -> str:
            done = subprocess.run(
                [*command, *more], env=environment(live), capture_output=True, text=True, timeout=PATIENCE_S, check=True
            )
            return done.stdout

        assert run() == "no model is loaded\n"
        live.post("/api/chat", {"model": "hello", "messages": HI})
        heading, row = run().splitlines()
        assert heading.split()[:2] == ["NAME", "SIZE"]
        assert row.startswith("hello:latest ")
        (found,) = json.loads(run("--json"))
        assert (found["name"], found["running"]) == ("hello:latest", 0)


def test_on_a_terminal_it_goes_on_until_ctrl_c(live: Live, tmp_path: Path) -> None:
    with live.running():
        live.post("/api/chat", {"model": "hello", "messages": HI})
        with terminal("top", "--interval", "0.1", env=environment(live), cwd=tmp_path, columns=160) as screen:
            screen.wait_for("hello:latest")
            screen.wait_for("Ctrl-C ends this")
            screen.send("\x03")
            assert screen.wait_for_end()[1] == 0


def test_on_a_narrow_terminal_each_model_is_one_line(live: Live, tmp_path: Path) -> None:
    with live.running():
        live.post("/api/chat", {"model": "hello", "messages": HI})
        with terminal("top", "--interval", "0.1", env=environment(live), cwd=tmp_path, columns=60) as screen:
            shown = screen.wait_for("Ctrl-C ends this")
            heading, row, _ = [line for line in shown.splitlines() if line.strip()][-3:]
            assert heading.split("looking…")[-1].split()[:3] == ["NAME", "SIZE", "PROCESSOR"]
            assert row.startswith("hello:latest ")
            screen.send("\x03")
            assert screen.wait_for_end()[1] == 0


def test_a_path_leaves_room_for_numbers() -> None:
    (row,) = rows_of([{**MODEL, "name": "/a/long/path/to/some/model.gguf"}], {}, {}, 1.0)
    assert _narrower(row, 80).name == "/a/long/pa…odel.gguf"
    assert _narrower(row, 200) == row


def test_no_server_is_an_error_with_the_next_step() -> None:
    env = {**os.environ, "OLLAMA_HOST": "127.0.0.1:1"}
    command = [sys.executable, "-m", "puna", "top", "--once"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 1
    assert "puna serve" in done.stderr
