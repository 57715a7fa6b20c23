"""Models on several machines, from the request to the answer: workers that come, go, and do not fit.

The workers are real and on loopback, as the server is; each test has its own ports.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from puna.store.recipe import Recipe
from puna.store.store import Store
from tests import rpc_workers
from tests.e2e.test_first_light import Server, serving
from tests.hostile_images import encoded, noise
from tests.patience import PATIENCE_S
from tests.ports import kept_free
from tests.rpc_workers import WorkerProcess
from tests.tiny import write_bert, write_llama
from tests.vision import gemma3

rpc_workers.needed()

# Layers of 8 MiB: large beside what a worker keeps for itself, small beside what a test machine has.
SHAPE: dict[str, Any] = {"n_layers": 7, "n_embd": 512, "n_heads": 8, "n_kv_heads": 2, "n_ff": 1024, "dtype": "f32", "n_ctx": 8192}
FIXED = {"num_ctx": 256, "num_batch": 64, "num_predict": 8, "temperature": 0, "ignore_eos": True}
SMALL = {"PUNA_WARM_SPARE": "0", "OLLAMA_NUM_PARALLEL": "1", "PUNA_KERNELS": "0"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rpc")
    store = Store(folder / "models")
    files = {
        "a": write_llama(folder / "a.gguf", seed=1, **SHAPE),
        "b": write_llama(folder / "b.gguf", seed=2, **SHAPE),
        "embedder": write_bert(folder / "bert.gguf", n_layers=2, n_embd=64, n_ff=64),
    }
    for name, file in files.items():
        store.create(name, Recipe(files={"model.gguf": store.blobs.import_file(file).digest}))
    store.close()
    return folder


def ask(server: Server, model: str, *, status: int = 200, prompt: str = "hello", **options: Any) -> str:
    body = {"model": model, "prompt": prompt, "options": FIXED | options, "stream": False, "keep_alive": -1}
    response = httpx.post(f"{server.url}/api/generate", json=body, timeout=PATIENCE_S)
    assert response.status_code == status, response.text
    return str(response.json()["response" if status == 200 else "error"])


def embed(server: Server) -> list[list[float]]:
    response = httpx.post(
        f"{server.url}/api/embed", json={"model": "embedder", "input": ["a fox", "the dog"]}, timeout=PATIENCE_S
    )
    assert response.status_code == 200, response.text
    found: list[list[float]] = response.json()["embeddings"]
    return found


def placed(server: Server, model: str) -> dict[str, int]:
    """Bytes by device, of those that have layers."""
    models = httpx.get(f"{server.url}/api/engine", timeout=PATIENCE_S).json()["models"]
    (memory,) = [m["memory"] for m in models if m["name"].startswith(f"{model}:")]
    return {m["device"]: m["weights"] + m["cache"] for m in memory if m["weights"] + m["cache"]}


def unload(server: Server, model: str) -> None:
    httpx.post(f"{server.url}/api/generate", json={"model": model, "keep_alive": 0}, timeout=PATIENCE_S)


@contextlib.contextmanager
def cluster(folder: Path, workers: list[WorkerProcess] | list[str], **given: str) -> Iterator[Server]:
    endpoints = ",".join(worker if isinstance(worker, str) else worker.endpoint for worker in workers)
    with serving(folder, **SMALL, PUNA_RPC=endpoints, **given) as server:
        yield server


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    """What one machine answers."""
    with serving(folder, **SMALL) as server:
        return {"a": ask(server, "a"), "b": ask(server, "b"), "vectors": embed(server)}


def test_layers_go_to_workers_as_their_memory_allows(folder: Path, alone: dict[str, Any]) -> None:
    """Forty MiB hold four of the layers, or five; what neither worker takes stays here. Two models share the workers."""
    with rpc_workers.running(2, "--memory", "40M") as workers, cluster(folder, workers) as server:
        devices = {d["name"]: d for d in httpx.get(f"{server.url}/api/engine", timeout=PATIENCE_S).json()["devices"]}
        assert ask(server, "a") == alone["a"]
        found = placed(server, "a")
        assert {worker.device for worker in workers} <= set(found)
        assert all(n_bytes <= 40 << 20 for device, n_bytes in found.items() if device != "CPU")
        (running,) = httpx.get(f"{server.url}/api/ps", timeout=PATIENCE_S).json()["models"]
        assert 0 < running["size_vram"] <= running["size"]
        assert ask(server, "b") == alone["b"]
        assert ask(server, "a", prompt="hello hello") == ask(server, "a", prompt="hello hello")
        assert embed(server) == [pytest.approx(vector, abs=1e-6) for vector in alone["vectors"]]
        devices = {d["name"]: d for d in httpx.get(f"{server.url}/api/engine", timeout=PATIENCE_S).json()["devices"]}
        assert all(devices[worker.device]["total"] == 40 << 20 for worker in workers)


@pytest.mark.thorough
def test_libllama_computes_on_workers_as_well(folder: Path) -> None:
    with rpc_workers.running(1, "--memory", "40M") as workers, cluster(folder, workers, OLLAMA_NEW_ENGINE="0") as server:
        answer = ask(server, "a")
        assert placed(server, "a")[workers[0].device] > 8 << 20
        assert answer == ask(server, "a", num_gpu=0)


@pytest.mark.thorough
def test_a_conversation_goes_on_in_the_cache_of_the_workers(folder: Path, alone: dict[str, Any]) -> None:
    """Its prefix is found again, and a context that is full moves on, with keys and values that are elsewhere."""
    with rpc_workers.running(1) as workers, cluster(folder, workers) as server:
        assert ask(server, "a") == alone["a"]
        assert list(placed(server, "a")) == [workers[0].device]
        body = {"model": "a", "prompt": "the quick brown fox " * 8, "options": FIXED, "stream": False}
        first, again = (httpx.post(f"{server.url}/api/generate", json=body, timeout=PATIENCE_S).json() for _ in range(2))
        assert first["response"] == again["response"]
        whole = httpx.post(
            f"{server.url}/api/generate", json=body | {"options": FIXED | {"num_predict": 400}}, timeout=PATIENCE_S
        )
        assert (whole.json()["eval_count"], whole.json()["done_reason"]) == (400, "length")
        text = httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text
        cached = sum(float(n) for n in re.findall(r"^puna_prompt_tokens_cached_total\S* (\S+)$", text, re.MULTILINE))
        assert cached > first["prompt_eval_count"], "both repetitions begin like the first"


def stream(server: Server, model: str, pieces: list[dict[str, Any]], begun: threading.Event) -> None:
    """An answer of ten contexts, which is not over before its worker is."""
    options = FIXED | {"num_ctx": SHAPE["n_ctx"], "num_predict": 10 * SHAPE["n_ctx"]}
    body = {"model": model, "prompt": "hello", "options": options, "keep_alive": -1}
    with httpx.stream("POST", f"{server.url}/api/generate", json=body, timeout=PATIENCE_S) as response:
        for line in response.iter_lines():
            pieces.append(json.loads(line))
            begun.set()
    begun.set()


def test_a_worker_that_dies_takes_its_model_and_nothing_else(folder: Path, alone: dict[str, Any]) -> None:
    """The answer under way ends with an error that names it; other models go on, and the next request does without it."""
    with rpc_workers.running(2, "--memory", "1G") as workers, cluster(folder, workers) as server:
        assert ask(server, "b", num_gpu=0) == alone["b"]
        assert ask(server, "a", num_ctx=SHAPE["n_ctx"]) == alone["a"]
        (device,) = placed(server, "a")
        (lost,) = [worker for worker in workers if worker.device == device]
        (other,) = [worker for worker in workers if worker is not lost]
        pieces: list[dict[str, Any]] = []
        begun = threading.Event()
        thread = threading.Thread(target=stream, args=(server, "a", pieces, begun))
        thread.start()
        assert begun.wait(PATIENCE_S)
        lost.kill()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        error = pieces[-1]["error"]
        assert error.startswith(f"the model was lost with some of its layers: the RPC worker {lost.endpoint} cannot be reached: ")
        assert other.endpoint not in error
        assert sum("error" in piece or piece.get("done", False) for piece in pieces) == 1
        assert ask(server, "b", num_gpu=0) == alone["b"]
        assert ask(server, "a") == alone["a"]
        assert list(placed(server, "a")) == [other.device]
    assert f"the RPC worker {lost.endpoint} cannot be reached" in (folder / "server.log").read_text()


def test_a_worker_that_comes_late_is_used_from_the_next_load_on(folder: Path, alone: dict[str, Any]) -> None:
    with kept_free() as port, cluster(folder, [f"127.0.0.1:{port}"]) as server:
        assert ask(server, "a") == alone["a"]
        assert list(placed(server, "a")) == ["CPU"]
        log = (folder / "server.log").read_text()
        assert log.count(f"the RPC worker 127.0.0.1:{port} cannot be reached: Connection refused") == 1
        worker = WorkerProcess(port=port)
        try:
            unload(server, "a")
            assert ask(server, "a") == alone["a"]
            assert list(placed(server, "a")) == [worker.device]
        finally:
            worker.close()


@pytest.mark.thorough
def test_a_worker_that_never_answers_delays_a_load_and_nothing_more(folder: Path, alone: dict[str, Any]) -> None:
    """It listens, as a machine does whose program hangs; also ggml's own server while it serves somebody else."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        with cluster(folder, [endpoint]) as server:
            assert ask(server, "a") == alone["a"]
        assert f"the RPC worker {endpoint} gave no answer within 4 s" in (folder / "server.log").read_text()


@pytest.mark.thorough
def test_a_worker_that_falls_silent_ends_the_model_after_a_while(folder: Path, alone: dict[str, Any]) -> None:
    """As a machine without power: no connection ends, nothing is said any more."""
    with rpc_workers.running(1, "--memory", "1G") as (worker,), cluster(folder, [worker], PUNA_STALL_TIMEOUT="8") as server:
        assert ask(server, "a") == alone["a"]
        os.kill(worker.process.pid, signal.SIGSTOP)
        try:
            error = ask(server, "a", status=502, prompt="another")
            assert error.startswith(
                f"the model was lost with some of its layers: the RPC worker {worker.endpoint} gave no answer within 4 s"
            )
            assert ask(server, "a") == alone["a"]
        finally:
            os.kill(worker.process.pid, signal.SIGCONT)


@pytest.mark.thorough
def test_what_a_model_sees_with_may_be_on_a_worker(tmp_path: Path) -> None:
    text = gemma3.write_text(tmp_path / "text.gguf", n_ctx=2048)
    projector = gemma3.encoder().save(tmp_path / "projector.gguf")
    image = base64.b64encode(encoded("PNG", noise(200, 100))).decode()
    body = {"model": str(text), "projector": str(projector), "images": [image], "prompt": "what is it", "raw": True}
    options = {"temperature": 0, "num_predict": 8, "ignore_eos": True}
    with rpc_workers.running() as workers, cluster(tmp_path, workers) as server:
        seen = []
        for more in ({}, {"num_gpu": 0}):
            given = body | {"options": options | more, "stream": False}
            response = httpx.post(f"{server.url}/api/generate", json=given, timeout=PATIENCE_S)
            assert response.status_code == 200, response.text
            seen.append(response.json()["response"])
    assert seen[0] == seen[1]


@pytest.mark.thorough
def test_a_real_model_says_the_same_on_two_machines(starter_store: Store, tmp_path: Path) -> None:
    """Quantised weights, a template, a conversation: half of the layers there, half here."""
    shutil.copytree(starter_store.root, tmp_path / "models", copy_function=os.link)
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    said = []
    with rpc_workers.running(1) as (worker,), cluster(tmp_path, [worker]) as server:
        for num_gpu in (0, 15, 999):
            options = {"temperature": 0, "num_predict": 24, "num_ctx": 512} | {"num_gpu": num_gpu}
            body = {"model": "smollm2:135m", "messages": messages, "options": options, "stream": False}
            response = httpx.post(f"{server.url}/api/chat", json=body, timeout=PATIENCE_S)
            assert response.status_code == 200, response.text
            said.append((response.json()["message"]["content"], sorted(placed(server, "smollm2"))))
    (alone, here), (half, both), (away, there) = said
    assert (here, both, there) == (["CPU"], ["CPU", worker.device], [worker.device])
    assert alone == half == away
