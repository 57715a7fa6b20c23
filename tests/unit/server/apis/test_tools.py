"""Tool calls through the native and the OpenAI routes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from puna.prompt.tools.forced import call_schema
from tests.unit.server.apis.test_native import HI, last_completion, lines
from tests.unit.server.apis.test_openai import events
from tests.unit.server.live import Live

TEMPLATE = (
    "{{ range .Tools }}<{{ .Function.Name }}>{{ end }}"
    "{{ range .Messages }}[{{ .Role }}{{ if .ToolName }} {{ .ToolName }}{{ end }}{{ if .ToolCallID }} {{ .ToolCallID }}{{ end }}:"
    '{{ .Content }}{{ if .ToolCalls }}<tool_call>{{ range .ToolCalls }}{"name": "{{ .Function.Name }}", '
    '"arguments": {{ .Function.Arguments }}}</tool_call>{{ end }}{{ end }}]{{ end }}'
)
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}},
    {"type": "function", "function": {"name": "time", "parameters": {"properties": {}}}},
]  # fmt: skip
PIECES = [
    "Let me",
    " see. <tool",
    '_call>{"name": "weather", "argu',
    'ments": {"city": "Oslo"}}</tool_call>',
    '<tool_call>{"name": "time"}',
    "</tool_call>",
]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    server = Live(tmp_path_factory.mktemp("tools"))
    server.add("caller", template=TEMPLATE, pieces=PIECES)
    server.add("broken", template=TEMPLATE, pieces=['<tool_call>{"name": "weather", "argum', "</tool_call>"])
    server.add(
        "mistral", template=TEMPLATE.replace("<tool_call>", "[TOOL_CALLS]"), pieces=['[TOOL_CALLS]weather[ARGS]{"city":1}']
    )
    with server.running():
        yield server


def test_native_stream(live: Live) -> None:
    *pieces, final = lines(live.post("/api/chat", {"model": "caller", "messages": HI, "tools": TOOLS}))
    messages = [piece["message"] for piece in pieces]
    assert "".join(message["content"] for message in messages) == "Let me see. "
    calls = [call for message in messages for call in message.get("tool_calls", [])]
    assert [call["function"] for call in calls] == [
        {"index": 0, "name": "weather", "arguments": {"city": "Oslo"}},
        {"index": 1, "name": "time", "arguments": {}},
    ]
    assert all(re.fullmatch(r"call_[a-z0-9]{8}", call["id"]) for call in calls)
    assert all(message["content"] == "" for message in messages if "tool_calls" in message)
    assert (final["done_reason"], final["message"]) == ("stop", {"role": "assistant", "content": ""})
    assert last_completion(live, "caller")["prompt"] == "<weather><time>[user:Hi]"
    assert last_completion(live, "caller")["show_control_tokens"] is False


def test_native_in_one_piece(live: Live) -> None:
    reply = live.post("/api/chat", {"model": "caller", "messages": HI, "tools": TOOLS, "stream": False}).json()
    assert reply["message"]["content"] == "Let me see. "
    assert [call["function"]["name"] for call in reply["message"]["tool_calls"]] == ["weather", "time"]


def test_without_tools_everything_is_text(live: Live) -> None:
    reply = live.post("/api/chat", {"model": "caller", "messages": HI, "stream": False}).json()
    assert reply["message"] == {"role": "assistant", "content": "".join(PIECES)}


def test_what_cannot_be_read_as_a_call_is_text(live: Live) -> None:
    reply = live.post("/api/chat", {"model": "broken", "messages": HI, "tools": TOOLS, "stream": False}).json()
    assert reply["message"] == {"role": "assistant", "content": '<tool_call>{"name": "weather", "argum</tool_call>'}


def test_marks_that_are_control_tokens_are_asked_for(live: Live) -> None:
    reply = live.post("/api/chat", {"model": "mistral", "messages": HI, "tools": TOOLS, "stream": False}).json()
    assert reply["message"]["tool_calls"][0]["function"]["arguments"] == {"city": 1}
    assert last_completion(live, "mistral")["show_control_tokens"] is True
    live.post("/api/chat", {"model": "mistral", "messages": HI, "stream": False})
    assert last_completion(live, "mistral")["show_control_tokens"] is False


def test_openai_in_one_piece(live: Live) -> None:
    reply = live.post("/v1/chat/completions", {"model": "caller", "messages": HI, "tools": TOOLS}).json()
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see. "
    first, second = choice["message"]["tool_calls"]
    assert first == {
        "index": 0,
        "id": first["id"],
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
    }
    assert (second["index"], second["function"]) == (1, {"name": "time", "arguments": "{}"})


def test_openai_stream(live: Live) -> None:
    body = {"model": "caller", "messages": HI, "tools": TOOLS, "stream": True}
    *chunks, _ = events(live.post("/v1/chat/completions", body))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": "Let me"}
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [(call["index"], json.loads(call["function"]["arguments"])) for call in calls] == [(0, {"city": "Oslo"}), (1, {})]
    assert chunks[-1]["choices"][0] == {"index": 0, "delta": {}, "finish_reason": "tool_calls"}


def test_a_conversation_with_results(live: Live) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    live.post("/v1/chat/completions", {"model": "caller", "messages": messages, "tools": TOOLS})
    assert last_completion(live, "caller")["prompt"] == (
        '<weather><time>[user:Hi][assistant:<tool_call>{"name": "weather", "arguments": {"city":"Oslo"}}</tool_call>]'
        "[tool weather c1:rain]"
    )


def test_tool_choice_none_offers_no_tools(live: Live) -> None:
    body = {"model": "caller", "messages": HI, "tools": TOOLS, "tool_choice": "none"}
    reply = live.post("/v1/chat/completions", body).json()
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["choices"][0]["message"]["content"] == "".join(PIECES)
    assert last_completion(live, "caller")["prompt"] == "[user:Hi]"


HARMONY = (
    "{{ range .Messages }}<|start|>{{ .Role }}<|message|>{{ .Content }}<|end|>{{ end }}{{ range .Tools }}{{ end }}"
    "<|start|>assistant"
)


def test_harmony(tmp_path: Path) -> None:
    server = Live(tmp_path)
    template = HARMONY + "{{ if .Response }}<|channel|>final<|message|>{{ .Response }}{{ end }}{{ if .Thinking }}{{ end }}"
    spoken = (
        '<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.time<|message|>{"x": 1}'
    )
    server.add("gpt", template=template, pieces=[spoken])
    with server.running():
        reply = server.post("/api/chat", {"model": "gpt", "messages": HI, "tools": TOOLS, "stream": False}).json()
        assert reply["message"].get("thinking") is None  # this template shows no thoughts, so the model is not said to think
        assert reply["message"]["tool_calls"][0]["function"] == {"index": 0, "name": "time", "arguments": {"x": 1}}
        assert last_completion(server, "gpt")["show_control_tokens"] is True


CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'


@pytest.mark.parametrize(
    ("path", "choice", "names"),
    [
        ("/v1/chat/completions", "required", ["weather", "time"]),
        ("/v1/chat/completions", {"type": "function", "function": {"name": "weather"}}, ["weather"]),
        ("/v1/responses", "required", ["weather", "time"]),
        ("/v1/responses", {"type": "function", "name": "weather"}, ["weather"]),
        ("/v1/messages", {"type": "any"}, ["weather", "time"]),
        ("/v1/messages", {"type": "tool", "name": "weather"}, ["weather"]),
    ],
)
def test_a_required_call_is_a_grammar(live: Live, forced: str, path: str, choice: Any, names: list[str]) -> None:
    flat = [tool["function"] for tool in TOOLS]
    tools: Any = {
        "/v1/chat/completions": TOOLS,
        "/v1/responses": [{"type": "function", **function} for function in flat],
        "/v1/messages": [{"name": function["name"], "input_schema": function["parameters"]} for function in flat],
    }[path]
    body = {"model": forced, "messages": HI, "input": "Hi", "max_tokens": 99, "tools": tools, "tool_choice": choice}
    response = live.post(path, body)
    assert response.status_code == 200, response.text
    grammar = last_completion(live, forced)["grammar"]
    schema = json.loads(grammar["text"])
    calls = schema.get("anyOf", [schema])
    assert grammar["kind"] == "json_schema"
    assert [call["properties"]["name"]["const"] for call in calls] == names
    assert calls[0]["properties"]["arguments"]["properties"] == {"city": {"type": "string"}}
    assert "tool_calls" in response.text or '"tool_use"' in response.text or '"function_call"' in response.text


@pytest.fixture(scope="module", params=["tagged", "harmonic"])
def forced(request: pytest.FixtureRequest, live: Live) -> str:
    """Models that write the bare call which the grammar leaves them."""
    template = TEMPLATE if request.param == "tagged" else HARMONY + "{{ if .Response }}<|channel|>{{ .Response }}{{ end }}"
    live.add(request.param, template=template, pieces=[CALL[:20], CALL[20:]])
    return str(request.param)


@pytest.mark.parametrize(
    ("tools", "choice", "text"),
    [
        (TOOLS, {"type": "function", "function": {"name": "nope"}}, 'tool_choice: there is no tool "nope"'),
        ([], "required", "tool_choice: a call is required, but there are no tools"),
    ],
)
def test_a_call_that_cannot_be_made(live: Live, tools: list[Any], choice: Any, text: str) -> None:
    response = live.post("/v1/chat/completions", {"model": "caller", "messages": HI, "tools": tools, "tool_choice": choice})
    assert (response.status_code, response.json()["error"]["message"]) == (400, text)


def test_definitions_move_to_the_root() -> None:
    parameters = {"properties": {"at": {"$ref": "#/$defs/place"}}, "$defs": {"place": {"type": "string"}}}
    schema = call_schema([{"function": {"name": "f", "parameters": parameters}}])
    assert schema["$defs"] == {"place": {"type": "string"}}
    assert "$defs" not in schema["properties"]["arguments"]
