"""Streams read line by line, by clients that split lines as Python does: also at U+0085, U+2028 and U+2029."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.contract.test_anthropic import TOOLED
from tests.unit.server.live import Live

TEXT = "one\u2028two\u2029three\x85four <é “ü”>"
ARGUMENTS = {"city": "Oslo\u2028\x85"}
PIECES = ["one\u2028", "two\u2029thr", "ee\x85four", " <é “ü”>"]
CALL = f'<tool_call>{{"name": "weather", "arguments": {json.dumps(ARGUMENTS, ensure_ascii=False)}}}</tool_call>'
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "now", "parameters": PARAMETERS}}
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    server = Live(tmp_path_factory.mktemp("lines"))
    server.add("poet", pieces=PIECES)
    server.add("agent", template=TOOLED, pieces=[CALL])
    server.add("broken", fail_at_piece=1, fail_text="a\u2028b")
    with server.running():
        yield server


def values(live: Live, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """One per line; of events what they say."""
    with live.client.stream("POST", path, json={"max_tokens": 50, **body, "stream": True}) as reply:
        assert reply.status_code == 200
        lines = [line for line in reply.iter_lines() if line and not line.startswith("event: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        ("/api/generate", {"prompt": "Hi"}, ("response",)),
        ("/api/chat", {"messages": HI}, ("message", "content")),
        ("/v1/completions", {"prompt": "Hi"}, ("choices", 0, "text")),
        ("/v1/chat/completions", {"messages": HI}, ("choices", 0, "delta", "content")),
        ("/v1/messages", {"messages": HI}, ("delta", "text")),
        ("/v1/responses", {"input": "Hi"}, ("delta",)),
    ],
)
def test_a_text_with_unicodes_line_ends(live: Live, path: str, body: dict[str, Any], where: tuple[str | int, ...]) -> None:
    assert "".join(found(value, where) for value in values(live, path, {"model": "poet", **body})) == TEXT


def found(value: Any, where: tuple[str | int, ...]) -> str:
    """The text there, or none."""
    for key in where:
        is_there = key in value if isinstance(value, dict) else isinstance(value, list) and value
        if not is_there:
            return ""
        value = value[key]
    return value if isinstance(value, str) else ""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", {"messages": HI, "tools": [TOOL]}),
        ("/v1/chat/completions", {"messages": HI, "tools": [TOOL]}),
        ("/v1/messages", {"messages": HI, "tools": [{"name": "weather", "input_schema": PARAMETERS}]}),
        ("/v1/responses", {"input": "Hi", "tools": [{"type": "function", "name": "weather", "parameters": PARAMETERS}]}),
    ],
)
def test_arguments_of_a_call(live: Live, path: str, body: dict[str, Any]) -> None:
    """Objects, and text of JSON in JSON."""
    parts = values(live, path, {"model": "agent", **body})
    texts = [part for value in parts for part in leaves(value)]
    assert ARGUMENTS["city"] in texts or ARGUMENTS in [json.loads(text) for text in texts if text.startswith('{"city"')]


def leaves(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from leaves(inner)


@pytest.mark.parametrize("path", ["/api/generate", "/v1/completions"])
def test_an_error_in_a_stream(live: Live, path: str) -> None:
    last = values(live, path, {"model": "broken", "prompt": "Hi"})[-1]
    assert "a\u2028b" in next(leaves(last["error"]))
