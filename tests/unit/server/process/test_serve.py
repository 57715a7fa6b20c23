"""The process: how it starts, and how it stops whatever is going on."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.patience import PATIENCE_S, wait_until
from tests.tiny import write_llama
from tests.unit.llm.scripted import events, fake_command, write_script

SERVE = """
from puna.llm.runner import Runner
from puna.server.process import serve as process
from puna.server.process.serve import serve
from puna.settings import load
from tests.patience import PATIENCE_S, wait_until

process._CANCEL_AFTER_S = PATIENCE_S  # what is told needs no more than its runner's end

async def launch(path):
    return await Runner.start({command!r})

serve(load(), launch=launch)
"""


@contextmanager
def serving(folder: Path, script: Path) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    environ = {**os.environ, "OLLAMA_HOST": "127.0.0.1:0", "OLLAMA_MODELS": str(folder / "models")}
    code = SERVE.format(command=fake_command(script))
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, env=environ)
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        assert "Listening on 127.0.0.1:" in line, line + process.stderr.read()
        port = int(line.partition("127.0.0.1:")[2].split()[0])
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
            yield process, client
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_llama(tmp_path / "tiny.gguf", n_layers=1, n_embd=32, n_ff=32))


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_idle_server_and_runners(tmp_path: Path, model: str, number: signal.Signals) -> None:
    script = write_script(tmp_path, "script")
    with serving(tmp_path, script) as (process, client):
        assert client.post("/api/generate", json={"model": model}).json()["done_reason"] == "load"
        runner = next(event[1] for event in events(script) if event[0] == "start")
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == 0
        assert not is_running(runner)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_wait_and_leaves_neither_runners_nor_a_traceback(
    tmp_path: Path, model: str, number: signal.Signals
) -> None:
    script = write_script(tmp_path, "script", n_pieces=100_000, piece_delay_s=0.05)
    with serving(tmp_path, script) as (process, client):
        with client.stream("POST", "/api/generate", json={"model": model, "prompt": "x"}) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(number)
            wait_until(lambda: refused(client))  # it has the first
            process.send_signal(number)
            with suppress(httpx.HTTPError):
                list(lines)
        assert process.wait(PATIENCE_S) == 0
        runner = next(event[1] for event in events(script) if event[0] == "start")
        assert not is_running(runner)
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def refused(client: httpx.Client) -> bool:
    try:
        httpx.get(client.base_url, timeout=PATIENCE_S)
    except httpx.HTTPError:
        return True
    return False


def test_running_requests_are_told(tmp_path: Path, model: str) -> None:
    script = write_script(tmp_path, "script", n_pieces=100_000, piece_delay_s=0.05)
    with serving(tmp_path, script) as (process, client):
        answers: list[Any] = []

        def ask(stream: bool) -> None:
            answers.append(client.post("/api/generate", json={"model": model, "prompt": "x", "stream": stream}))

        threads = [threading.Thread(target=ask, args=(stream,)) for stream in (True, False)]
        for thread in threads:
            thread.start()
        wait_until(lambda: sum(event[0] == "complete" for event in events(script)) == 2)
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
        for thread in threads:
            thread.join()
    errors = [json.loads(answer.text.splitlines()[-1]) for answer in answers]
    assert errors == [{"error": "the model was unloaded, or the server is shutting down"}] * 2
    assert sorted(answer.status_code for answer in answers) == [200, 500]


def test_a_killed_server_leaves_no_runner(tmp_path: Path, model: str) -> None:
    script = write_script(tmp_path, "script")
    with serving(tmp_path, script) as (process, client):
        client.post("/api/generate", json={"model": model})
        runner = next(event[1] for event in events(script) if event[0] == "start")
        process.kill()
        process.wait()
        wait_until(lambda: not is_running(runner))


def test_the_address_is_taken(tmp_path: Path, model: str) -> None:
    with serving(tmp_path, write_script(tmp_path, "script")) as (_, client):
        environ = {**os.environ, "OLLAMA_HOST": str(client.base_url)}
        code = "from puna.settings import load; from puna.server.process.serve import serve; serve(load())"
        second = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
        assert second.returncode != 0
        assert f"listen tcp 127.0.0.1:{client.base_url.port}: Address already in use" in second.stderr


def test_the_server_never_imports_the_engine() -> None:
    code = (
        "import importlib, sys, puna.server.process.serve; from puna.server.apis import routes\n"
        "for names in routes._LATER.values(): [importlib.import_module(f'{routes._APIS}.{name}') for name in names]\n"
        "print([name for name in sys.modules if name.startswith('puna.')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    rooms = {name.split(".")[1] for name in ast.literal_eval(found)}
    assert rooms.isdisjoint({"native", "ml", "nn", "kvcache", "model", "runner", "sample", "tokenizer"})
