"""Requests as programs make them that no test can install, read in their sources, and what these read in the answers.

Home Assistant's integration (2026, with the official client), Zed's crate ``ollama``, Continue's provider for Ollama, and Open
WebUI 0.12.4. Programs that install from the package index talk themselves, in tests/e2e/test_programs.py.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import ollama
import pytest

from tests.patience import PATIENCE_S
from tests.unit.server.apis.test_tools import PIECES, TEMPLATE, TOOLS
from tests.unit.server.live import Live

SYSTEM = {"role": "system", "content": "You help."}
ASKED = {"role": "user", "content": "What is the weather in Oslo?"}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    server = Live(tmp_path_factory.mktemp("programs"))
    server.add("hello")
    server.add("caller", template=TEMPLATE, pieces=PIECES)
    with server.running():
        yield server


def lines(live: Live, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = live.post(path, body)
    assert response.status_code == 200, response.text
    found = [json.loads(line) for line in response.text.splitlines()]
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    return found


def test_home_assistant(live: Live) -> None:
    """Asks for models and what is loaded every half minute; chats with tools, and sends their results without names."""

    async def scenario() -> None:
        client = ollama.AsyncClient(host=live.url, headers={"Authorization": "Bearer anything"}, timeout=PATIENCE_S)
        installed, _loaded = await asyncio.gather(client.list(), client.ps())
        assert "caller:latest" in {model["model"] for model in installed.get("models", [])}
        messages = [ollama.Message.model_validate(SYSTEM), ollama.Message.model_validate(ASKED)]
        for keep_alive in (-1, "300s"):
            stream = await client.chat(
                model="caller:latest",
                messages=messages,
                tools=TOOLS,
                stream=True,
                keep_alive=keep_alive,
                options={"num_ctx": 2048.0},  # its form gives numbers with a fraction
                think=False,
                format=None,
            )
            parts = [part["message"] async for part in stream]
            calls = [call for part in parts for call in part.get("tool_calls") or []]
            assert [call["function"]["name"] for call in calls] == ["weather", "time"]
            assert calls[0]["function"]["arguments"] == {"city": "Oslo"}
            called = [
                ollama.Message.ToolCall(
                    function=ollama.Message.ToolCall.Function(
                        name=call["function"]["name"], arguments=call["function"]["arguments"]
                    )
                )
                for call in calls
            ]
            content = "".join(part.get("content") or "" for part in parts)
            messages.append(ollama.Message(role="assistant", content=content, tool_calls=called))
            messages += [ollama.Message(role="tool", content='{"data": {"sky": "grey"}, "error": null}') for _ in calls]
        structure: dict[str, Any] = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
        stream = await client.chat(
            model="hello",
            messages=[ollama.Message.model_validate(ASKED)],
            stream=True,
            keep_alive="300s",
            options={"num_ctx": 2048},
            format=structure,
        )
        assert "".join([part["message"]["content"] async for part in stream]) == "Hello world"
        await client._client.aclose()

    asyncio.run(scenario())


def test_zed(live: Live) -> None:
    """Writes what it leaves open as null, tools as an empty list, and reads every field of these as it is here."""
    (model,) = [m for m in live.client.get("/api/tags").json()["models"] if m["name"] == "caller:latest"]
    assert {"name": str, "modified_at": str, "size": int, "digest": str}.items() <= {k: type(v) for k, v in model.items()}.items()
    assert {"format", "family", "families", "parameter_size", "quantization_level"} <= set(model["details"])
    assert "tools" in live.post("/api/show", {"model": "caller:latest"}).json()["capabilities"]
    options = {"num_ctx": 2048, "num_predict": None, "stop": ["User:"], "temperature": 1.0, "top_p": None}
    body: dict[str, Any] = {
        "model": "caller:latest",
        "messages": [SYSTEM, ASKED],
        "stream": True,
        "keep_alive": -1,
        "options": options,
        "tools": [],
        "think": None,
    }
    assert lines(live, "/api/chat", body)[-1]["done_reason"] == "stop"
    body["tools"] = [
        {"type": "function", "function": {"name": tool["function"]["name"], "description": None, "parameters": None}}
        for tool in TOOLS
    ]
    found = lines(live, "/api/chat", body)
    assert all(line["message"]["role"] == "assistant" and isinstance(line["message"]["content"], str) for line in found)
    assert isinstance(found[-1]["prompt_eval_count"], int)
    assert isinstance(found[-1]["eval_count"], int)
    calls = [call for line in found for call in line["message"].get("tool_calls", [])]
    assert [call["function"]["name"] for call in calls] == ["weather", "time"]
    called = [{"function": {"name": "weather", "arguments": {"city": "Oslo"}}}]
    body["messages"] += [
        {"role": "assistant", "content": "", "tool_calls": called, "thinking": None},
        {"role": "tool", "tool_name": "weather", "content": "grey"},
        {"role": "assistant", "content": "It is grey.", "tool_calls": None, "thinking": None},
        {"role": "user", "content": "And now?"},
    ]
    assert lines(live, "/api/chat", body)[-1]["done"]


def test_continue(live: Live) -> None:
    """Takes parameters apart with an expression of its own, and gives up on lines that do not match it."""
    shown = live.post("/api/show", {"name": "caller"}).json()
    assert isinstance(shown["template"], str)
    for line in filter(None, shown.get("parameters", "").split("\n")):
        assert re.match(r'^(\S+)\s+((?:".*")|\S+)$', line)
    options = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "num_predict": 64, "stop": ["\n\n"], "num_ctx": 2048, "mirostat": 0}
    common: dict[str, Any] = {"model": "hello", "options": options | {"min_p": 0.1}, "keep_alive": 1800}
    found = lines(live, "/api/generate", common | {"prompt": "def f(", "raw": True, "stream": True})
    assert "".join(line["response"] for line in found) == "Hello world"
    chat = common | {"messages": [SYSTEM | {"images": None}, ASKED]}
    assert "".join(line["message"]["content"] for line in lines(live, "/api/chat", chat)) == "Hello world"
    asked = live.post("/api/chat", chat | {"model": "caller", "tools": TOOLS, "stream": False}).json()
    assert asked["message"]["role"] == "assistant"
    assert [json.dumps(call["function"]["arguments"]) for call in asked["message"]["tool_calls"]] == ['{"city": "Oslo"}', "{}"]


def test_open_webui(live: Live) -> None:
    """It passes on what its page says, with root parameters out of the options, and unloads with an empty prompt."""
    assert re.fullmatch(r"[0-9.]+\S*", live.client.get("/api/version").json()["version"])
    assert live.client.get("/api/tags").status_code == live.client.get("/api/ps").status_code == 200
    body = {
        "model": "caller:latest",
        "messages": [
            SYSTEM,
            ASKED,
            {"role": "assistant", "content": "", "tool_calls": []},
            {"role": "user", "content": "Go on."},
        ],
        "stream": True,
        "tools": TOOLS,
        "options": {"temperature": 0.7, "num_predict": 16, "stop": ["<|im_end|>"], "seed": 1, "num_thread": 1},
        "keep_alive": "5m",
        "think": False,
        "system": "You help.",
    }
    found = lines(live, "/api/chat", body)
    assert {"total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration"} <= set(
        found[-1]
    )
    assert any(line["message"].get("tool_calls") for line in found)
    unloaded = live.post("/api/generate", {"model": "caller:latest", "keep_alive": 0, "prompt": ""}).json()
    assert unloaded["done_reason"] == "unload"
    embedded = live.post("/api/embed", {"model": "hello", "input": ["a"], "truncate": True})
    assert embedded.status_code == 501
    assert "does not support embeddings" in embedded.json()["error"]
    for path, more in (
        ("/v1/chat/completions", {"messages": [ASKED], "stream_options": {"include_usage": True}, "stream": True}),
        ("/v1/messages", {"messages": [ASKED], "max_tokens": 8}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 8}),
    ):
        assert live.post(path, {"model": "hello", **more}).status_code == 200
    assert {model["id"].removesuffix(":latest") for model in live.client.get("/v1/models").json()["data"]} >= {"hello", "caller"}
