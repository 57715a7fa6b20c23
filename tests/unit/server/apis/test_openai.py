from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from puna.api.openai import Message, native_messages
from puna.store.recipe import Recipe
from tests.unit.server.apis.test_native import FULL_NAME, HI, last_completion
from tests.unit.server.live import Live


def events(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream"
    parts = response.text.split("\n\n")
    assert parts[-1] == ""
    assert all(part.startswith("data: ") for part in parts[:-1])
    return [part[6:] if part == "data: [DONE]" else json.loads(part[6:]) for part in parts[:-1]]


def test_chat_completion(shared: Live) -> None:
    reply = shared.post("/v1/chat/completions", {"model": "hello", "messages": HI}).json()
    assert reply.pop("id").startswith("chatcmpl-")
    assert isinstance(reply.pop("created"), int)
    assert reply == {
        "object": "chat.completion",
        "model": "hello",
        "system_fingerprint": "fp_ollama",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello world"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
    }


def test_chat_completion_stream(shared: Live) -> None:
    body = {"model": "hello", "messages": HI, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, done = events(shared.post("/v1/chat/completions", body))
    assert done == "[DONE]"
    assert {(chunk["id"], chunk["created"], chunk["object"]) for chunk in chunks} == {
        (chunks[0]["id"], chunks[0]["created"], "chat.completion.chunk")
    }
    assert [chunk["choices"] for chunk in chunks] == [
        [{"index": 0, "delta": {"role": "assistant", "content": "Hel"}, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "lo"}, "finish_reason": None}],
        [{"index": 0, "delta": {"content": " world"}, "finish_reason": None}],
        [{"index": 0, "delta": {}, "finish_reason": "stop"}],
        [],
    ]
    assert chunks[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    without = events(shared.post("/v1/chat/completions", body | {"stream_options": None}))
    assert len(without) == len(chunks)
    assert not any("usage" in chunk for chunk in without[:-1])


def test_an_answer_without_text_still_has_a_role(empty: Live) -> None:
    empty.add("mute", pieces=[])
    with empty.running():
        first, _ = events(empty.post("/v1/chat/completions", {"model": "mute", "messages": HI, "stream": True}))
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_completion(shared: Live) -> None:
    reply = shared.post("/v1/completions", {"model": "hello", "prompt": "Hi"}).json()
    assert reply["object"] == "text_completion"
    assert reply["choices"] == [{"text": "Hello world", "index": 0, "finish_reason": "stop"}]
    assert reply["usage"]["total_tokens"] == 7
    assert last_completion(shared)["prompt"] == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    body = {"model": "hello", "prompt": "Hi", "stream": True, "stream_options": {"include_usage": True}}
    *chunks, done = events(shared.post("/v1/completions", body))
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == "Hello world"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens"] == 3
    loaded = shared.post("/v1/completions", {"model": "hello", "prompt": ""}).json()
    assert loaded["choices"][0]["finish_reason"] == "load"
    shared.post("/v1/completions", {"model": "infill", "prompt": "a", "suffix": "b"})
    assert last_completion(shared, "infill")["prompt"] == "<pre>a<suf>b<mid>"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"temperature": 1.0, "top_p": 1.0, "top_k": 40}),
        ({"temperature": 0, "top_p": 0.5}, {"temperature": 0.0, "top_p": 0.5}),
        (
            {"seed": 3, "frequency_penalty": 0.1, "presence_penalty": 0.2},
            {"seed": 3, "frequency_penalty": 0.1, "presence_penalty": 0.2},
        ),
        ({"max_tokens": 2}, {"n_predict": 2}),
        ({"max_completion_tokens": 1}, {"n_predict": 1}),
        ({"max_completion_tokens": 1, "max_tokens": 3}, {"n_predict": 3}),
        ({"stop": "x"}, {"stop": ["x"]}),
        ({"stop": ["x", "y"]}, {"stop": ["x", "y"]}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
        ({"n": 1, "user": "u", "logit_bias": {}, "store": True, "tool_choice": "auto"}, {"stop": []}),
    ],
)
def test_parameters(shared: Live, given: dict[str, Any], expected: dict[str, Any]) -> None:
    shared.post("/v1/chat/completions", {"model": "hello", "messages": HI, **given})
    sent = last_completion(shared)
    assert {name: (sent | sent["sampling"])[name] for name in expected} == expected


def test_a_models_own_parameters_count_more_than_openais_defaults(empty: Live) -> None:
    empty.add("tuned", Recipe(parameters={"temperature": 0.2}))
    with empty.running():
        empty.post("/v1/chat/completions", {"model": "tuned", "messages": HI})
        sampling = last_completion(empty, "tuned")["sampling"]
        assert (sampling["temperature"], sampling["top_p"]) == (0.2, 1.0)


@pytest.mark.parametrize(
    ("body", "status", "kind", "text"),
    [
        ({"model": "hello", "messages": []}, 400, "invalid_request_error", "[] is too short - 'messages'"),
        ({"model": "nope", "messages": HI}, 404, "not_found_error", "model 'nope' not found"),
        ({"model": "hello", "messages": [{"role": "user"}]}, 400, "invalid_request_error", "invalid message content type: <nil>"),
        ({"model": "hello", "messages": HI, "tools": [{}]}, 400, "invalid_request_error", f"{FULL_NAME} does not support tools"),
        (
            {"model": "hello", "messages": HI, "reasoning_effort": "lots"},
            400,
            "invalid_request_error",
            'invalid reasoning value: "lots" (must be one of "none", "minimal", "low", "medium", "high", "xhigh", "ultra", '
            '"max")',
        ),
    ],
)
def test_errors(shared: Live, body: dict[str, Any], status: int, kind: str, text: str) -> None:
    response = shared.post("/v1/chat/completions", body)
    assert response.status_code == status
    assert response.json() == {"error": {"message": text, "type": kind, "param": None, "code": None}}


def test_an_error_in_the_middle_of_a_stream_is_an_event(empty: Live) -> None:
    empty.add("late", fail_at_piece=1)
    with empty.running():
        first, error = events(empty.post("/v1/chat/completions", {"model": "late", "messages": HI, "stream": True}))
        assert first["choices"][0]["delta"]["content"] == "Hel"
        assert error["error"]["message"] == "the sky fell"


def test_models(empty: Live) -> None:
    with empty.running():
        assert empty.client.get("/v1/models").json() == {"object": "list", "data": []}
        empty.add("hello")
        (model,) = empty.client.get("/v1/models").json()["data"]
        assert model == {"id": "hello:latest", "object": "model", "created": model["created"], "owned_by": "library"}
        assert empty.client.get("/v1/models/hello").json() == model | {"id": "hello"}
        missing = empty.client.get("/v1/models/nope")
        assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")


def test_messages_become_native_ones() -> None:
    call = {"id": "c1", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": "data:;base64,aGk="}]},
        {"role": "assistant", "tool_calls": [call], "reasoning": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    assert native_messages([Message.model_validate(message) for message in messages]) == [
        {"role": "user", "content": "a"},
        {"role": "user", "content": "", "images": ["aGk="]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": {"x": 1}}}],
            "thinking": "hm",
        },
        {"role": "tool", "content": "42", "tool_name": "f", "tool_call_id": "c1"},
    ]


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": [{"type": "image_url", "image_url": {"url": "https://x/y.png"}}]}, "image URLs are not currently supported"),
        ({"content": [{"type": "image_url", "image_url": {"url": "data:text/html;base64,aGk="}}]}, "invalid image input"),
        ({"content": [{"type": "image_url", "image_url": {"url": "data:;base64,***"}}]}, "invalid image input"),
        ({"content": [{"type": "video"}]}, "invalid message format"),
        ({"content": ["text"]}, "invalid message format"),
        ({"content": 5}, "invalid message content type: int"),
        ({"content": "", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}, "invalid tool call arguments"),
        ({"content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "invalid tool call arguments"),
    ],
)
def test_messages_that_cannot_be_understood(message: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        native_messages([Message.model_validate({"role": "user", **message})])


def test_logprobs_of_plain_completions(shared: Live) -> None:
    """The fake runner's pieces are a token each, of logprob -1."""
    ask = {"model": "hello", "prompt": "Hi", "logprobs": 2}
    (choice,) = shared.post("/v1/completions", ask).json()["choices"]
    assert choice["logprobs"] == {
        "tokens": ["Hel", "lo", " world"],
        "token_logprobs": [-1.0, -1.0, -1.0],
        "top_logprobs": [{"?": -2.0}] * 3,
        "text_offset": [0, 3, 5],
    }
    *chunks, _ = events(shared.post("/v1/completions", {**ask, "stream": True}))
    scored = [chunk["choices"][0] for chunk in chunks if "logprobs" in chunk["choices"][0]]
    assert [(c["text"], c["logprobs"]["text_offset"]) for c in scored] == [("Hel", [0]), ("lo", [3]), (" world", [5])]
    (plain,) = shared.post("/v1/completions", {"model": "hello", "prompt": "Hi"}).json()["choices"]
    assert "logprobs" not in plain
    assert shared.post("/v1/completions", {**ask, "logprobs": 21}).status_code == 400


def test_there_is_no_cloud(shared: Live) -> None:
    assert shared.client.get("/api/status").json() == {"cloud": {"disabled": True, "source": "none"}}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stop", [["a", 5], [None], 5, {"a": 1}, [["a"]]])
def test_stop_sequences_are_texts(shared: Live, path: str, stop: Any) -> None:
    refused = shared.post(path, {"model": "hello", "messages": HI, "prompt": "Hi", "stop": stop})
    assert refused.status_code == 400
    assert "stop" in refused.json()["error"]["message"]
    for sound in ("a", ["a", "b"], [], None):
        assert shared.post(path, {"model": "hello", "messages": HI, "prompt": "Hi", "stop": sound}).status_code == 200
