"""OpenAI's Responses API: the official client against a live server with scripted runners."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import FunctionToolParam

from tests.contract.test_anthropic import ANSWER, TOOLED
from tests.patience import PATIENCE_S
from tests.unit.server.apis.test_native import last_completion
from tests.unit.server.live import Live

WEATHER: FunctionToolParam = {
    "type": "function",
    "name": "weather",
    "strict": False,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    server = Live(tmp_path_factory.mktemp("responses"))
    server.add("hello", cached_count=1)
    server.add("agent", template=TOOLED, pieces=ANSWER)
    server.add("late", fail_at_piece=1)
    with server.running():
        yield server


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


def test_a_text(client: openai.OpenAI, live: Live) -> None:
    reply = client.responses.create(model="hello", input="Hi", instructions="Be brief.", temperature=0.5, max_output_tokens=40)
    assert reply.output_text == "Hello world"
    assert (reply.status, reply.object, reply.instructions) == ("completed", "response", "Be brief.")
    assert reply.usage is not None
    assert reply.usage.input_tokens_details.cached_tokens == 1
    assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens
    sent = last_completion(live)
    assert sent["prompt"].startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>")
    assert (sent["n_predict"], sent["sampling"]["temperature"], sent["sampling"]["top_p"]) == (40, 0.5, 1.0)


def test_a_limit_makes_it_incomplete(client: openai.OpenAI) -> None:
    reply = client.responses.create(model="hello", input="Hi", max_output_tokens=2)
    assert (reply.status, reply.output_text) == ("incomplete", "Hello")
    assert reply.incomplete_details is not None
    assert reply.incomplete_details.reason == "max_output_tokens"


def test_the_clients_stream_helper(client: openai.OpenAI) -> None:
    with client.responses.stream(model="hello", input="Hi") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == "Hello world"


def test_events_in_the_documented_order(live: Live) -> None:
    body = {"model": "agent", "input": "Hi", "tools": [WEATHER], "stream": True}
    response = live.post("/v1/responses", body)
    assert response.headers["content-type"] == "text/event-stream"
    assert response.headers["cache-control"] == "no-cache"
    *events, end = response.text.split("\n\n")
    assert end == ""
    pairs = [(event.split("\n")[0], json.loads(event.split("\n")[1][6:])) for event in events]
    assert all(line == f"event: {data['type']}" for line, data in pairs)
    assert [data["sequence_number"] for _, data in pairs] == list(range(len(pairs)))
    names = [data["type"].removeprefix("response.") for _, data in pairs]
    assert names == [
        "created",
        "in_progress",
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    thought, message, call = pairs[-1][1]["response"]["output"]
    assert (thought["type"], thought["summary"][0]["text"], thought["encrypted_content"]) == ("reasoning", "Hm.", "Hm.")
    assert (message["type"], message["content"][0]["text"], message["status"]) == ("message", "I look.\n", "completed")
    assert (call["name"], call["arguments"], call["status"]) == ("weather", '{"city": "Oslo"}', "completed")
    whole = live.post("/v1/responses", body | {"stream": False}).json()
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call"]


def test_a_conversation_with_results(client: openai.OpenAI, live: Live) -> None:
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "Hm."},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It rains.", "annotations": []}]},
        {"type": "message", "role": "user", "content": "Thanks"},
    ]
    client.responses.create(model="agent", input=items, tools=[WEATHER])
    assert last_completion(live, "agent")["prompt"] == (
        '<weather>[user:Hi]<think>Hm.</think>[assistant:(weather {"city":"Oslo"})][tool weather:rain]'
        "[assistant:It rains.][user:Thanks]"
    )
    client.responses.create(model="agent", input="Hi", tools=[WEATHER], tool_choice="none")
    assert last_completion(live, "agent")["prompt"] == "[user:Hi]"


def test_thinking_can_be_off(client: openai.OpenAI) -> None:
    reply = client.responses.create(model="agent", input="Hi", reasoning={"effort": "none"})
    assert [item.type for item in reply.output] == ["message"]


def test_errors(client: openai.OpenAI, live: Live) -> None:
    with pytest.raises(openai.NotFoundError, match="model 'nope' not found"):
        client.responses.create(model="nope", input="Hi")
    *_, last = [event.type for event in client.responses.create(model="late", input="Hi", stream=True)]
    assert last == "response.failed"
    assert live.post("/v1/responses", {"model": "late", "input": "Hi"}).status_code == 500


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "input must be a string or array"),
        ({"input": []}, "input must not be empty"),
        ({"input": [5]}, "input[0]: must be an object"),
        ({"input": [{"content": "x"}]}, "input item missing required 'type' field"),
        ({"input": [{"type": "magic"}]}, 'input[0]: unknown input item type: "magic"'),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "file inputs are not currently supported"),
        ({"input": [{"role": "user", "content": [{"type": "smell"}]}]}, "content[0]: unknown content type: smell"),
        ({"input": [{"type": "function_call", "arguments": "{"}]}, "failed to parse function call arguments"),
        ({"input": "x", "reasoning": {"effort": "lots"}}, 'invalid reasoning value: "lots"'),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id is not supported"),
    ],
)
def test_bad_requests(live: Live, given: dict[str, Any], text: str) -> None:
    response = live.post("/v1/responses", {"model": "hello", **given})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(text)
