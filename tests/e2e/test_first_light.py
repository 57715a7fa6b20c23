"""The whole way: a server process, real runner processes, tiny models with random weights."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import ollama
import openai
import psutil
import pytest

from tests.patience import PATIENCE_S, wait_until
from tests.processes import children, command_of
from tests.tiny import write_llama

GREEDY = {"temperature": 0, "ignore_eos": True, "num_predict": 48, "num_ctx": 512}
# An answer may have ten contexts' worth of tokens: more than any machine makes while a test waits.
N_CTX = 1 << 16
N_ENDLESS = 10 * N_CTX
ENDLESS = {**GREEDY, "num_ctx": N_CTX, "num_predict": N_ENDLESS}


class Server:
    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url
        self.client = httpx.Client(base_url=url, timeout=120)

    def chat(self, model: str, text: str, **fields: Any) -> dict[str, Any]:
        body = {"model": model, "messages": [{"role": "user", "content": text}], "stream": False, "options": GREEDY, **fields}
        response = self.client.post("/api/chat", json=body)
        assert response.status_code == 200, response.text
        reply: dict[str, Any] = response.json()
        return reply

    def runners(self) -> list[psutil.Process]:
        return [child for child in children(psutil.Process(self.process.pid)) if "runner" in command_of(child)]

    def counted(self, name: str) -> int:
        """The sum over all models of what their runners count; one that is too busy to say it at once is asked again."""
        lines: list[str] = []

        def are_told() -> bool:
            text = self.client.get("/metrics").text
            lines[:] = [line for line in text.splitlines() if line.startswith(f"puna_{name}{{")]
            return bool(lines) and "puna_runner_requests_active{" in text  # a count is told of those that do not answer, too

        wait_until(are_told)
        return sum(int(float(line.rpartition(" ")[2])) for line in lines)


@contextmanager
def serving(folder: Path, **environ: str) -> Iterator[Server]:
    """Without a spare runner, so that every runner there is has a model."""
    places = {"OLLAMA_HOST": "127.0.0.1:0", "OLLAMA_MODELS": str(folder / "models")}
    given = {**os.environ, **places, "PUNA_WARM_SPARE": "0", **environ}
    log = (folder / "server.log").open("w+")
    process = subprocess.Popen([sys.executable, "-m", "puna", "serve"], stderr=log, text=True, env=given)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while "Listening on 127.0.0.1:" not in (text := (folder / "server.log").read_text()):
            assert process.poll() is None, text
            assert time.monotonic() < deadline, text
            time.sleep(0.02)
        port = text.partition("Listening on 127.0.0.1:")[2].split()[0]
        server = Server(process, f"http://127.0.0.1:{port}")
        with server.client:
            yield server
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
        log.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", dtype="f32", n_ctx=N_CTX))


def test_it_answers(server: Server, model: str) -> None:
    reply = server.chat(model, "why is the sky blue?")
    assert reply["message"]["content"]
    assert (reply["done_reason"], reply["eval_count"]) == ("length", 48)
    assert reply["prompt_eval_count"] > 10
    (running,) = server.client.get("/api/ps").json()["models"]
    assert running["name"] == model
    assert running["context_length"] == 512
    assert running["size"] > 0


def test_streaming_gives_the_same_text(server: Server, model: str) -> None:
    body = {"model": model, "messages": [{"role": "user", "content": "hello world"}], "options": GREEDY}
    with server.client.stream("POST", "/api/chat", json=body) as response:
        lines = [json.loads(line) for line in response.iter_lines()]
    assert all(not line["done"] for line in lines[:-1])
    assert len(lines) > 10
    assert "".join(line["message"]["content"] for line in lines) == server.chat(model, "hello world")["message"]["content"]


def test_eight_at_once_answer_as_one_by_one(server: Server, model: str) -> None:
    """In F32: with quantised weights ggml rounds activations, and sums in another order for a row than for a batch."""
    questions = [f"{number} foxes run to the river " * (number + 1) for number in range(8)]
    one_by_one = [server.chat(model, text)["message"]["content"] for text in questions]
    with ThreadPoolExecutor(8) as pool:
        at_once = list(pool.map(lambda text: server.chat(model, text)["message"]["content"], questions))
    assert at_once == one_by_one
    assert len(set(one_by_one)) == 8


def test_generate_remembers_through_context(server: Server, model: str) -> None:
    first = server.client.post(
        "/api/generate", json={"model": model, "prompt": "once upon", "stream": False, "options": GREEDY}
    ).json()
    assert len(first["context"]) >= first["prompt_eval_count"] + 40
    body = {"model": model, "prompt": "a time", "stream": False, "options": GREEDY, "context": first["context"]}
    second = server.client.post("/api/generate", json=body).json()
    assert second["prompt_eval_count"] > len(first["context"])


def test_a_prompt_that_is_too_long(server: Server, model: str) -> None:
    body = {"model": model, "prompt": "the lazy dog " * 1000, "stream": False, "options": GREEDY, "raw": True}
    refused = server.client.post("/api/generate", json={**body, "truncate": False})
    assert refused.status_code == 400
    assert "exceeds the context length" in refused.json()["error"]
    cut = server.client.post("/api/generate", json=body)
    assert cut.status_code == 200
    assert cut.json()["prompt_eval_count"] <= 512


def test_a_killed_runner_fails_its_request_and_is_replaced(server: Server, model: str) -> None:
    expected = server.chat(model, "hello")["message"]["content"]
    body = {"model": model, "prompt": "hello", "options": ENDLESS}
    with server.client.stream("POST", "/api/generate", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        (runner,) = server.runners()
        runner.send_signal(signal.SIGKILL)
        *_, last = lines
    assert "signal SIGKILL" in json.loads(last)["error"]
    assert server.chat(model, "hello")["message"]["content"] == expected


def test_a_client_that_leaves_frees_the_runner(server: Server, model: str) -> None:
    assert_who_leaves_frees_the_runner(server, model)


def assert_who_leaves_frees_the_runner(server: Server, model: str) -> None:
    """With as many endless requests as the runner computes at once, the next one would wait until they have ended."""
    body = {"model": model, "prompt": "hello", "options": ENDLESS}
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        streams = [client.stream("POST", "/api/generate", json=body) for _ in range(4)]
        for stream in streams:
            next(stream.__enter__().iter_lines())
        for stream in streams:
            stream.__exit__(None, None, None)
    server.chat(model, "hello", options={**GREEDY, "num_predict": 1})
    wait_until(lambda: server.counted("runner_requests_active") == 0)
    assert server.counted("runner_answer_tokens_total") < N_ENDLESS, "one of them alone would have had as many"


def test_a_truncated_file_is_refused_and_the_server_lives(server: Server, model: str, tmp_path: Path) -> None:
    whole = Path(model).read_bytes()
    for n_bytes in (0, 10, 3000, len(whole) // 2, len(whole) - 1):
        file = tmp_path / f"cut{n_bytes}.gguf"
        file.write_bytes(whole[:n_bytes])
        response = server.client.post("/api/generate", json={"model": str(file), "prompt": "x"})
        assert response.status_code == 500
        assert file.name in response.json()["error"]
    assert server.chat(model, "hello")["done"] is True


def test_unloading_ends_the_process(server: Server, model: str) -> None:
    server.chat(model, "hello")
    assert len(server.runners()) == 1
    server.client.post("/api/generate", json={"model": model, "keep_alive": 0})
    wait_until(lambda: not server.runners())
    # The server hears of the end of a process a moment after it.
    wait_until(lambda: server.client.get("/api/ps").json() == {"models": []})


def test_official_clients(server: Server, model: str) -> None:
    native = ollama.Client(host=server.url)
    content = native.chat(model, [{"role": "user", "content": "hello"}], options=GREEDY).message.content
    native._client.close()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", timeout=PATIENCE_S) as client:
        reply = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "hello"}],
            temperature=0,
            max_tokens=48,
            extra_body={"ignore_eos": True},
        )
    assert reply.choices[0].message.content == content


def test_three_models_at_most_stay_loaded(tmp_path: Path) -> None:
    models = [str(write_llama(tmp_path / f"{seed}.gguf", seed=seed, n_layers=1)) for seed in range(3)]
    with serving(tmp_path, OLLAMA_MAX_LOADED_MODELS="2") as server:
        answers = [server.chat(model, "hello")["message"]["content"] for model in models]
        assert {item["name"] for item in server.client.get("/api/ps").json()["models"]} == set(models[1:])
        assert server.chat(models[0], "hello")["message"]["content"] == answers[0]
        assert len(server.runners()) == 2
