"""The official clients against a live server with a scripted runner, and raw fields that the clients do not look at."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import ollama
import openai
import pytest

from tests.patience import PATIENCE_S, wait_until
from tests.unit.server.live import Live

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    server = Live(tmp_path_factory.mktemp("api"))
    server.add("hello")
    server.add("late", fail_at_piece=1)
    server.add("slow", n_pieces=100_000, piece_delay_s=0.02)
    with server.running():
        yield server


@pytest.fixture
def native(live: Live) -> Iterator[ollama.Client]:
    client = ollama.Client(host=live.url, timeout=PATIENCE_S)
    yield client
    client._client.close()


@pytest.fixture
def compatible(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


def test_ollama_generate(native: ollama.Client) -> None:
    whole = native.generate("hello", "Hi", options={"temperature": 0}, keep_alive="5m")
    assert whole.response == "Hello world"
    assert (whole.done, whole.done_reason, whole.eval_count, whole.prompt_eval_count) == (True, "stop", 4, 3)
    assert whole.total_duration is not None
    assert whole.total_duration > 0
    assert whole.context is not None
    parts = list(native.generate("hello", "Hi", stream=True))
    assert [part.response for part in parts] == ["Hel", "lo", " world", ""]
    assert [part.done for part in parts] == [False, False, False, True]


def test_ollama_chat(native: ollama.Client) -> None:
    whole = native.chat("hello", HI)
    assert whole.message.content == "Hello world"
    assert whole.message.role == "assistant"
    assert whole.done_reason == "stop"
    assert "".join(part.message.content or "" for part in native.chat("hello", HI, stream=True)) == "Hello world"


def test_ollama_load_ps_unload(native: ollama.Client) -> None:
    assert native.generate("hello", keep_alive=-1).done_reason == "load"
    running = {model.model: model for model in native.ps().models}
    assert running["hello:latest"].context_length == 2048
    assert running["hello:latest"].size == 1234
    assert running["hello:latest"].details is not None
    assert running["hello:latest"].details.family == "llama"
    assert native.generate("hello", keep_alive=0).done_reason == "unload"


def test_ollama_lists_models(native: ollama.Client) -> None:
    assert "hello:latest" in {model.model for model in native.list().models}


def test_ollama_errors(native: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError) as missing:
        native.generate("nope", "Hi")
    assert missing.value.status_code == 404
    assert missing.value.error == "model 'nope' not found"
    with pytest.raises(ollama.ResponseError, match="does not support images"):
        native.chat("hello", [{"role": "user", "content": "x", "images": [b"x"]}])
    with pytest.raises(ollama.ResponseError, match="the sky fell"):
        list(native.generate("late", "Hi", stream=True))
    with pytest.raises(ollama.ResponseError, match="the sky fell"):
        native.generate("late", "Hi")


def test_ollama_closing_a_stream_cancels(native: ollama.Client, live: Live) -> None:
    stream = native.generate("slow", "Hi", stream=True)
    assert next(iter(stream)).response == "x "
    stream.close()  # type: ignore[attr-defined]
    path = live.store.get("slow").model_path
    assert path is not None
    wait_until(lambda: any(event[0] == "cancelled" for event in live.events(live.scripts[path])))


async def _chat_many(url: str, count: int) -> list[str | None]:
    client = ollama.AsyncClient(host=url)
    try:
        replies = await asyncio.gather(*(client.chat("hello", HI) for _ in range(count)))
    finally:
        await client._client.aclose()
    return [reply.message.content for reply in replies]


def test_ollama_many_at_once(live: Live) -> None:
    assert asyncio.run(_chat_many(live.url, 32)) == ["Hello world"] * 32


def test_openai_chat(compatible: openai.OpenAI) -> None:
    whole = compatible.chat.completions.create(model="hello", messages=[{"role": "user", "content": "Hi"}], seed=1, max_tokens=50)
    assert whole.choices[0].message.content == "Hello world"
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (3, 4, 7)
    assert whole.system_fingerprint == "fp_ollama"
    cut = compatible.chat.completions.create(model="hello", messages=[{"role": "user", "content": "Hi"}], max_completion_tokens=1)
    assert cut.choices[0].finish_reason == "length"


def test_openai_chat_stream(compatible: openai.OpenAI) -> None:
    stream = compatible.chat.completions.create(
        model="hello",
        messages=[{"role": "user", "content": "Hi"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello world"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 7


def test_openai_completion(compatible: openai.OpenAI) -> None:
    assert compatible.completions.create(model="hello", prompt="Hi", stop=["x"]).choices[0].text == "Hello world"
    stream = compatible.completions.create(model="hello", prompt="Hi", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "Hello world"


def test_openai_models(compatible: openai.OpenAI) -> None:
    assert "hello:latest" in {model.id for model in compatible.models.list()}
    assert compatible.models.retrieve("hello").owned_by == "library"


def test_openai_errors(compatible: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="model 'nope' not found"):
        compatible.chat.completions.create(model="nope", messages=[{"role": "user", "content": "Hi"}])
    with pytest.raises(openai.BadRequestError, match="is too short"):
        compatible.chat.completions.create(model="hello", messages=[])
    with pytest.raises(openai.APIError, match="the sky fell"):
        list(compatible.chat.completions.create(model="late", messages=[{"role": "user", "content": "Hi"}], stream=True))
