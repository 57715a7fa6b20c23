"""The official Anthropic client against a live server with scripted runners."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import MessageParam, ToolParam

from tests.patience import PATIENCE_S
from tests.unit.server.apis.test_native import last_completion
from tests.unit.server.live import Live

HI: list[MessageParam] = [{"role": "user", "content": "Hi"}]
TOOLED = (
    "{{ range .Tools }}<{{ .Function.Name }}>{{ end }}{{ range .Messages }}"
    "{{ if .Thinking }}<think>{{ .Thinking }}</think>{{ end }}[{{ .Role }}{{ if .ToolName }} {{ .ToolName }}{{ end }}:"
    "{{ .Content }}{{ range .ToolCalls }}({{ .Function.Name }} {{ .Function.Arguments }}){{ end }}]{{ end }}"
)
WEATHER: ToolParam = {
    "name": "weather",
    "description": "now",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
ANSWER = ["<think>Hm", ".</think>I look", ".\n", '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>']


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    server = Live(tmp_path_factory.mktemp("anthropic"))
    server.add("hello", cached_count=1)
    server.add("agent", template=TOOLED, pieces=ANSWER)
    server.add("late", fail_at_piece=1)
    server.add("early", fail_at_piece=0, fail_status=503)
    with server.running():
        yield server


@pytest.fixture
def client(live: Live) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


def test_message(client: anthropic.Anthropic, live: Live) -> None:
    reply = client.messages.create(
        model="hello",
        max_tokens=50,
        messages=HI,
        system="Be brief.",
        stop_sequences=["END"],
        extra_body={"temperature": 0.5, "top_k": 3},
    )
    assert reply.id.startswith("msg_")
    assert [block.model_dump(include={"type", "text"}) for block in reply.content] == [{"type": "text", "text": "Hello world"}]
    assert (reply.role, reply.model, reply.stop_reason) == ("assistant", "hello", "end_turn")
    assert (reply.usage.input_tokens, reply.usage.cache_read_input_tokens, reply.usage.output_tokens) == (5, 1, 4)
    sent = last_completion(live)
    assert sent["prompt"].startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>")
    assert (sent["n_predict"], sent["stop"], sent["sampling"]["temperature"], sent["sampling"]["top_k"]) == (50, ["END"], 0.5, 3)


def test_a_limit_is_a_stop_reason(client: anthropic.Anthropic) -> None:
    reply = client.messages.create(model="hello", max_tokens=2, messages=HI)
    assert reply.stop_reason == "max_tokens"


def test_stream(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model="hello", max_tokens=50, messages=HI) as stream:
        assert list(stream.text_stream) == ["Hel", "lo", " world"]
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn"
    assert (final.usage.input_tokens, final.usage.output_tokens) == (2, 4)


def test_thinking_and_tools(client: anthropic.Anthropic) -> None:
    with client.messages.stream(
        model="agent", max_tokens=2000, messages=HI, tools=[WEATHER], thinking={"type": "enabled", "budget_tokens": 1024}
    ) as stream:
        events = list(stream)
        streamed = stream.get_final_message()
    whole = client.messages.create(model="agent", max_tokens=50, messages=HI, tools=[WEATHER])
    for reply in (streamed, whole):
        thought, text, call = reply.content
        assert isinstance(thought, anthropic.types.ThinkingBlock)
        assert isinstance(text, anthropic.types.TextBlock)
        assert isinstance(call, anthropic.types.ToolUseBlock)
        assert (thought.thinking, text.text) == ("Hm.", "I look.\n")
        assert (call.name, call.input) == ("weather", {"city": "Oslo"})
        assert reply.stop_reason == "tool_use"
    kinds = [event.type for event in events]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"


def test_events_in_order(live: Live) -> None:
    body = {"model": "agent", "max_tokens": 9, "messages": HI, "tools": [WEATHER], "stream": True}
    response = live.post("/v1/messages", body)
    assert response.headers["content-type"] == "text/event-stream"
    *events, end = response.text.split("\n\n")
    assert end == ""
    pairs = [(event.split("\n")[0], json.loads(event.split("\n")[1][6:])) for event in events]
    assert all(line == f"event: {data['type']}" for line, data in pairs)
    assert [data["type"] for _, data in pairs] == [
        "message_start",
        *["content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"] * 2,
        *["content_block_start", "content_block_delta", "content_block_stop"],
        "message_delta",
        "message_stop",
    ]
    assert pairs[0][1]["message"]["usage"]["input_tokens"] > 0
    assert pairs[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_a_conversation_with_results(client: anthropic.Anthropic, live: Live) -> None:
    call: Any = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}}
    result: Any = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]}
    messages: list[MessageParam] = [
        *HI,
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, call]},
        {"role": "user", "content": [{"type": "text", "text": "So?"}, result]},
    ]
    client.messages.create(model="agent", max_tokens=9, messages=messages, tools=[WEATHER])
    assert last_completion(live, "agent")["prompt"] == (
        '<weather>[user:Hi][assistant:I look.(weather {"city":"Oslo"})][tool weather:rain][user:So?]'
    )
    client.messages.create(model="agent", max_tokens=9, messages=HI, tools=[WEATHER], tool_choice={"type": "none"})
    assert last_completion(live, "agent")["prompt"] == "[user:Hi]"


def test_count_tokens(client: anthropic.Anthropic) -> None:
    assert client.messages.count_tokens(model="hello", messages=HI).input_tokens == 3
    assert client.messages.count_tokens(model="hello", messages=HI, system="one two three").input_tokens > 4


def test_thinking_is_dropped_where_a_model_does_not_think(client: anthropic.Anthropic) -> None:
    reply = client.messages.create(
        model="hello", max_tokens=2000, messages=HI, thinking={"type": "enabled", "budget_tokens": 1024}
    )
    assert reply.stop_reason == "end_turn"


def test_errors(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="model 'nope' not found"):
        client.messages.create(model="nope", max_tokens=5, messages=HI)
    with pytest.raises(anthropic.InternalServerError, match="the sky fell") as caught:
        client.messages.create(model="early", max_tokens=5, messages=HI, stream=True)
    assert caught.value.status_code == 503
    with (
        pytest.raises(anthropic.APIStatusError, match="the sky fell"),
        client.messages.stream(model="late", max_tokens=5, messages=HI) as stream,
    ):
        list(stream)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({}, "model is required"),
        ({"model": "hello", "messages": HI}, "max_tokens is required and must be positive"),
        ({"model": "hello", "max_tokens": 5}, "messages is required"),
        ({"model": "hello", "max_tokens": 5, "messages": [{"role": "user"}]}, "messages: content must be a string or a list"),
        ({"model": "hello", "max_tokens": 5, "messages": HI, "system": 5}, "system must be a string or a list"),
        ({"model": "hello", "max_tokens": 5, "messages": HI, "tools": [{"name": "f"}]}, 'invalid input_schema for tool "f"'),
        (
            {"model": "hello", "max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "invalid image source",
        ),
        (
            {
                "model": "hello",
                "max_tokens": 5,
                "messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}],
            },
            "tool_use block missing required 'name' field",
        ),
    ],
)
def test_bad_requests(live: Live, body: dict[str, Any], text: str) -> None:
    response = live.post("/v1/messages", body)
    assert response.status_code == 400
    error = response.json()
    assert error.keys() == {"type", "error", "request_id"}
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert error["error"]["message"].startswith(text)
