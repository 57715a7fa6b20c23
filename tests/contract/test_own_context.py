"""A request's own context in a larger one that is loaded, and what is told of a prompt that does not fit: the official
clients, a server, and a real runner."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import anthropic
import ollama
import openai
import pytest

from puna.store.recipe import Recipe
from tests.contract.test_embed_routes import Serving, ok
from tests.tiny import CORPUS, write_bert, write_llama

LOADED = 512
OWN = 128
LONG = "one two three four five six seven eight nine ten " * 30
SHORT = "once upon a time there was a fox who knew many things"
PLAIN = "{{ range .Messages }}{{ .Content }}\n{{ end }}"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("server")
    server = Serving(folder)
    file = write_llama(folder / "llama.gguf", seed=3, n_layers=1, n_embd=64, n_ff=64, chat_template=None)
    digest = server.store.blobs.import_file(file).digest
    server.store.create("chat", Recipe(files={"model.gguf": digest}, template=PLAIN, parameters={"num_ctx": LOADED}))
    server.store.create("small", Recipe(files={"model.gguf": digest}, template=PLAIN, parameters={"num_ctx": OWN}))
    server.create("bert", write_bert(folder / "bert.gguf", n_ctx=64))
    with server.running():
        yield server


@pytest.fixture
def native(live: Serving) -> Iterator[ollama.Client]:
    with ollama.Client(host=live.url) as client:
        client.generate("chat", "x", options={"num_predict": 1})
        began = starts(live)
        yield client
        assert starts(live) == began, "a smaller context needs no other load"
        assert LOADED in [model.context_length for model in client.ps().models]


def starts(live: Serving) -> list[int]:
    return [runner.pid for _, runner in live.scheduler.models.runners()]


def ask(native: ollama.Client, prompt: str, *, n_ctx: int = OWN, **more: Any) -> ollama.GenerateResponse:
    options = {"num_ctx": n_ctx, "ignore_eos": True, "temperature": 0, **more.pop("options", {})}
    reply: ollama.GenerateResponse = native.generate("chat", prompt, options=options, **more)
    return reply


def test_a_prompt_is_cut_to_the_requests_own_context(native: ollama.Client) -> None:
    whole = native.generate("chat", LONG, options={"num_predict": 1})
    assert whole.prompt_eval_count is not None
    cut = ask(native, LONG, options={"num_predict": 5})
    assert cut.prompt_eval_count is not None
    assert cut.prompt_eval_count == OWN - 5
    assert cut.eval_count == 5


@pytest.mark.parametrize("num_batch", [None, 512])
def test_no_reload_for_less(native: ollama.Client, num_batch: int | None) -> None:
    assert ask(native, SHORT, options={"num_predict": 2, "num_batch": num_batch}).eval_count == 2


def test_too_long_for_its_own_context_is_an_error_if_it_may_not_be_cut(live: Serving, native: ollama.Client) -> None:
    body = {"model": "chat", "prompt": LONG[:600], "truncate": False, "stream": False}
    assert ok(live.post("/api/generate", {**body, "options": {"num_predict": 1}}))["eval_count"] == 1
    refused = live.post("/api/generate", {**body, "options": {"num_ctx": OWN}})
    assert refused.status_code == 400
    assert f"context {OWN}" in refused.json()["error"]


def test_without_shift_prompt_and_answer_fill_the_context_to_the_token(live: Serving, native: ollama.Client) -> None:
    body = {"model": "chat", "prompt": SHORT, "shift": False, "stream": False}
    for n_ctx in (OWN, OWN + 1, LOADED):
        reply = ok(live.post("/api/generate", {**body, "options": {"num_ctx": n_ctx, "ignore_eos": True}}))
        assert reply["prompt_eval_count"] + reply["eval_count"] == n_ctx
        assert reply["done_reason"] == "length"


def test_with_shift_the_answer_goes_on_in_its_own_context(native: ollama.Client) -> None:
    assert ask(native, SHORT, options={"num_predict": 3 * OWN}).eval_count == 3 * OWN
    assert ask(native, SHORT, options={"num_predict": 10**6}).eval_count == 10 * OWN


def test_minus_two_fills_the_context_once(native: ollama.Client) -> None:
    reply = ask(native, SHORT, options={"num_predict": -2})
    assert reply.prompt_eval_count is not None
    assert reply.eval_count == OWN - reply.prompt_eval_count
    assert reply.done_reason == "length"


def test_the_models_own_parameter_counts_as_the_requests(live: Serving, native: ollama.Client) -> None:
    assert native.generate("small", LONG, options={"num_predict": 5}).prompt_eval_count == OWN - 5
    assert native.generate("small", LONG, options={"num_predict": 5, "num_ctx": 200}).prompt_eval_count == 195


def test_embeddings_keep_to_it(live: Serving) -> None:
    body = {"model": "bert", "input": [CORPUS, "x"]}
    before = ok(live.post("/api/embed", body))
    assert (before["prompt_eval_count"], before["truncated_count"] > 64) == (64 + 3, True)
    began = starts(live)
    own = ok(live.post("/api/embed", {**body, "options": {"num_ctx": 16}}))
    assert own["prompt_eval_count"] == 16 + 3
    assert own["truncated_count"] == before["truncated_count"] + 48
    refused = live.post("/api/embed", {**body, "truncate": False, "input": "one two " * 12, "options": {"num_ctx": 16}})
    assert refused.status_code == 400
    assert "context 16" in refused.json()["error"]
    assert "truncated_count" not in ok(live.post("/api/embed", {"model": "bert", "input": "x"}))
    assert starts(live) == began
    usage = ok(live.post("/v1/embeddings", {"model": "bert", "input": CORPUS}))["usage"]
    assert usage["prompt_tokens_details"] == {"truncated_tokens": before["truncated_count"]}


# What was cut is told.


def conversation(n: int) -> list[dict[str, str]]:
    return [{"role": "user" if i % 2 == 0 else "assistant", "content": f"{i} {SHORT}"} for i in range(n)]


def test_every_api_tells_how_much_of_a_conversation_was_left_out(live: Serving, caplog: pytest.LogCaptureFixture) -> None:
    messages: Any = conversation(61)
    n_whole = ok(
        live.post("/api/chat", {"model": "chat", "messages": messages[-1:], "options": {"num_predict": 1}, "stream": False})
    )
    assert "truncated_count" not in n_whole
    assert "truncated_messages" not in n_whole
    with caplog.at_level(logging.WARNING):
        body = {"model": "chat", "messages": messages, "options": {"num_predict": 1}, "stream": False}
        reply = ok(live.post("/api/chat", body))
    n_messages, n_tokens = reply["truncated_messages"], reply["truncated_count"]
    assert f"{n_messages} messages were left out" in caplog.text
    assert str(n_tokens) in caplog.text
    # Every message takes the same number of tokens, up to the digits of its number.
    per_message = reply["prompt_eval_count"] / (61 - n_messages)
    assert n_tokens == pytest.approx(n_messages * per_message, rel=0.1)
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="-", max_retries=0) as client:
        usage: Any = client.chat.completions.create(model="chat", messages=messages, max_tokens=1).usage
        assert usage.prompt_tokens_details.truncated_tokens == n_tokens
        assert usage.prompt_tokens_details.truncated_messages == n_messages
        details: Any = client.responses.create(model="chat", input=messages, max_output_tokens=1).usage
        assert details.input_tokens_details.truncated_tokens == n_tokens
        with pytest.raises(openai.BadRequestError, match="exceeds the context length"):
            client.responses.create(model="chat", input=messages, max_output_tokens=1, truncation="disabled")
        with pytest.raises(openai.BadRequestError, match="truncation"):
            client.responses.create(model="chat", input="x", truncation="sometimes")  # type: ignore[call-overload]
    with anthropic.Anthropic(base_url=live.url, api_key="-") as claude:
        counted: Any = claude.messages.create(model="chat", max_tokens=1, messages=messages).usage
        assert counted.truncated_input_tokens == n_tokens


def test_what_the_runner_cuts_is_told_too(live: Serving) -> None:
    whole = ok(
        live.post("/api/generate", {"model": "chat", "prompt": LONG[:900], "options": {"num_predict": 1}, "stream": False})
    )
    cut = ok(
        live.post(
            "/api/generate",
            {"model": "chat", "prompt": LONG[:900], "options": {"num_predict": 1, "num_ctx": OWN}, "stream": False},
        )
    )
    assert "truncated_count" not in whole
    assert cut["truncated_count"] == whole["prompt_eval_count"] - cut["prompt_eval_count"] > 0
    assert "truncated_messages" not in cut
