"""Embeddings over HTTP with the official clients: a server, a real runner process, a tiny BERT."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import openai
import pytest

from puna import wire
from puna.llm.runner import Runner
from puna.server.placing.loading import launch_runner
from puna.store.recipe import Recipe
from tests.patience import wait_until
from tests.tiny import CORPUS, write_bert, write_llama
from tests.unit.server.live import Live

TEXTS = ["hello world", "the quick brown fox jumps over the lazy dog", "x"]
NO_EMBEDDINGS = "this model does not support embeddings"


class Serving(Live):
    async def _launch(self, model_path: Path) -> Runner:
        return await launch_runner(model_path)

    def create(self, name: str, file: Path) -> None:
        self.store.create(name, Recipe(files={"model.gguf": self.store.blobs.import_file(file).digest}))


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("server")
    server = Serving(folder)
    server.create("bert", write_bert(folder / "bert.gguf", n_ctx=64))
    server.create("unpooled", write_bert(folder / "unpooled.gguf", seed=2, pooling=0))
    server.create("chat", write_llama(folder / "llama.gguf", n_layers=1, n_embd=64, n_ff=64))
    with server.running():
        yield server


@pytest.fixture(scope="module")
def native(live: Serving) -> Iterator[ollama.Client]:
    client = ollama.Client(host=live.url)
    yield client
    client._client.close()


@pytest.fixture(scope="module")
def compatible(live: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def length(vector: Any) -> float:
    return math.sqrt(sum(x * x for x in vector))


def ok(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def test_a_list_gives_unit_vectors_in_its_order(native: ollama.Client) -> None:
    reply = native.embed("bert", TEXTS)
    assert [len(vector) for vector in reply.embeddings] == [128] * 3
    assert [length(vector) for vector in reply.embeddings] == pytest.approx([1.0] * 3, abs=1e-6)
    for text, vector in zip(TEXTS, reply.embeddings, strict=True):
        assert native.embed("bert", text).embeddings[0] == pytest.approx(vector, abs=2e-3)
    assert reply.model == "bert"
    assert reply.prompt_eval_count is not None
    assert reply.prompt_eval_count > 3 * len(TEXTS)  # each has its two special tokens
    assert reply.total_duration is not None
    assert reply.load_duration is not None
    assert 0 < reply.load_duration < reply.total_duration


def test_dimensions_are_cut_and_normalised_again(native: ollama.Client) -> None:
    whole, part = (native.embed("bert", TEXTS[1], dimensions=n).embeddings[0] for n in (None, 16))
    assert len(part) == 16
    assert length(part) == pytest.approx(1.0, abs=1e-6)
    assert part == pytest.approx([x / length(whole[:16]) for x in whole[:16]], abs=1e-6)


@pytest.mark.parametrize("body", [{}, {"input": ""}, {"input": []}, {"input": None}])
def test_no_input_only_loads(live: Serving, body: dict[str, Any]) -> None:
    assert ok(live.post("/api/embed", {"model": "bert", **body})) == {"model": "bert", "embeddings": []}
    assert [model["name"] for model in live.client.get("/api/ps").json()["models"]] == ["bert:latest"]


def test_a_long_input_is_cut_only_on_request(live: Serving) -> None:
    cut = ok(live.post("/api/embed", {"model": "bert", "input": [CORPUS, "x"]}))
    assert cut["prompt_eval_count"] == 64 + 3
    refused = live.post("/api/embed", {"model": "bert", "input": CORPUS, "truncate": False})
    assert refused.status_code == 400
    assert refused.json()["error"].startswith("the input length exceeds the context length (")
    assert refused.json()["error"].endswith("tokens, context 64)")


def test_the_older_form_is_not_normalised(native: ollama.Client, live: Serving) -> None:
    plain = native.embeddings("bert", TEXTS[1]).embedding
    unit = native.embed("bert", TEXTS[1]).embeddings[0]
    assert length(plain) > 2
    assert [x / length(plain) for x in plain] == pytest.approx(unit, abs=1e-6)
    assert ok(live.post("/api/embeddings", {"model": "bert", "prompt": ""})) == {"embedding": []}
    assert live.post("/api/embeddings", {"model": "bert", "prompt": CORPUS}).status_code == 400


def test_openai_floats_base64_and_usage(compatible: openai.OpenAI, live: Serving) -> None:
    floats = compatible.embeddings.create(model="bert", input=TEXTS, encoding_format="float")
    packed = compatible.embeddings.create(model="bert", input=TEXTS)  # asks for base64 and decodes it
    assert [item.index for item in floats.data] == [0, 1, 2]
    for one, other in zip(floats.data, packed.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
    assert floats.usage.prompt_tokens == floats.usage.total_tokens > 6
    assert len(compatible.embeddings.create(model="bert", input="x", dimensions=16).data[0].embedding) == 16
    raw = ok(live.post("/v1/embeddings", {"model": "bert", "input": "", "encoding_format": "BASE64"}))
    assert raw["object"] == "list"
    assert length(struct.unpack("<128f", base64.b64decode(raw["data"][0]["embedding"]))) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    ("path", "body", "status", "error"),
    [
        ("/api/embed", {"input": "a"}, 404, "model '' not found"),
        ("/api/embed", {"model": "none", "input": "a"}, 404, 'model "none" not found, try pulling it first'),
        ("/api/embed", {"model": "bert", "input": 7}, 400, "invalid input type"),
        ("/api/embed", {"model": "bert", "input": ["a", 7]}, 400, "invalid input type"),
        ("/api/embed", {"model": "chat", "input": "a"}, 501, NO_EMBEDDINGS),
        ("/api/embed", {"model": "unpooled", "input": "a"}, 501, NO_EMBEDDINGS),
        ("/api/embeddings", {"prompt": "a"}, 400, "model is required"),
        ("/api/embeddings", {"model": "chat", "prompt": "a"}, 501, NO_EMBEDDINGS),
        ("/api/generate", {"model": "bert", "prompt": "a"}, 400, '"bert" does not support generate'),
        ("/v1/embeddings", {"model": "bert"}, 400, "invalid input"),
        ("/v1/embeddings", {"model": "bert", "input": []}, 400, "invalid input"),
        ("/v1/embeddings", {"model": "bert", "input": None}, 400, "invalid input"),
        ("/v1/embeddings", {"model": "bert", "input": [[1, 2]]}, 400, "invalid input type"),
        (
            "/v1/embeddings",
            {"model": "bert", "input": "a", "encoding_format": "hex"},
            400,
            "Invalid value for 'encoding_format' = hex. Supported values: ['float', 'base64'].",
        ),
    ],
)
def test_what_cannot_be_embedded_is_said(live: Serving, path: str, body: dict[str, Any], status: int, error: str) -> None:
    response = live.post(path, body)
    said = response.json()["error"]
    assert (response.status_code, said["message"] if path.startswith("/v1") else said) == (status, error)


def test_show_names_the_ability(live: Serving) -> None:
    assert ok(live.post("/api/show", {"model": "bert"}))["capabilities"] == ["embedding"]


def test_a_client_that_leaves_stops_the_work(live: Serving) -> None:
    ok(live.post("/api/embed", {"model": "bert"}))
    path = live.store.get("bert").model_path
    assert path is not None
    process = live.scheduler.models[path].runner
    texts = [CORPUS[:250]] * 4000
    body = json.dumps({"model": "bert", "input": texts}).encode()

    def health() -> wire.Health:
        return asyncio.run_coroutine_threadsafe(process.health(), live.loop).result(10)

    before = health().steps
    with socket.create_connection(("127.0.0.1", live.port)) as client:
        client.sendall(b"POST /api/embed HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: health().steps > before)
    wait_until(lambda: not health().active and not health().waiting)
    assert health().steps - before < len(texts) * 60 / 512 / 2
