"""Structured output and logprobs on their way through the server: what the runner is asked, what the client gets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from puna.api.generate import GenerateRequest
from puna.errors import BadRequest, PunaError
from puna.prompt.thinking import Tags
from puna.server.answering.constraint import with_thinking
from puna.server.checking.grammar import grammar_of
from puna.store.recipe import Recipe
from puna.wire import Grammar
from tests.unit.server.apis.test_native import HI, last_completion, lines
from tests.unit.server.apis.test_openai import events
from tests.unit.server.live import Live

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}

STRICT = {"name": "x", "strict": True, "schema": SCHEMA}


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, None),
        ({"format": None}, None),
        ({"format": ""}, None),
        ({"format": "json"}, Grammar(kind="json")),
        ({"format": SCHEMA}, Grammar(kind="json_schema", text=json.dumps(SCHEMA))),
        ({"format": {}}, Grammar(kind="json_schema", text="{}")),
        ({"regex": "a|b"}, Grammar(kind="regex", text="a|b")),
        ({"lark": "start: A"}, Grammar(kind="lark", text="start: A")),
    ],
)
def test_what_a_request_asks_for(fields: dict[str, Any], grammar: Grammar | None) -> None:
    assert grammar_of(GenerateRequest.model_validate(fields)) == grammar


@pytest.mark.parametrize("value", ["xml", 3, True, ["json"]])
def test_what_is_no_format(value: Any) -> None:
    with pytest.raises(PunaError, match='expected "json" or a valid JSON Schema object'):
        grammar_of(GenerateRequest.model_validate({"format": value}))


def test_one_wish_at_a_time() -> None:
    with pytest.raises(BadRequest, match="only one of"):
        grammar_of(GenerateRequest.model_validate({"format": "json", "lark": "start: A"}))


def test_a_model_that_thinks_may_think_first() -> None:
    grammar, tags = Grammar(kind="json"), Tags("<think>", "</think>")
    begun = with_thinking(grammar, tags, "assistant\n<think>\n")
    own = with_thinking(grammar, tags, "assistant\n")
    assert begun == Grammar(kind="json", thinking_end="</think>")
    assert own == Grammar(kind="json", thinking_begin="<think>", thinking_end="</think>")
    assert with_thinking(grammar, None, "<think>") == grammar
    assert with_thinking(None, tags, "") is None


@pytest.mark.parametrize("path", ["/api/generate", "/api/chat"])
def test_the_runner_gets_the_schema_as_it_was_written(shared: Live, path: str) -> None:
    body = {"model": "hello", "prompt": "x", "messages": HI, "format": SCHEMA, "stream": False}
    assert shared.post(path, body).status_code == 200
    asked = last_completion(shared, "hello")["grammar"]
    assert (asked["kind"], json.loads(asked["text"])) == ("json_schema", SCHEMA)
    assert list(json.loads(asked["text"])["properties"]) == ["b", "a"]


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json", ""),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            "json_schema",
            json.dumps(SCHEMA),
        ),
        ({"regex": "[0-9]+"}, "regex", "[0-9]+"),
        ({"lark": "start: A"}, "lark", "start: A"),
    ],
)
def test_openais_ways_to_say_it(shared: Live, fields: dict[str, Any], kind: str, text: str) -> None:
    assert shared.post("/v1/chat/completions", {"model": "hello", "messages": HI, **fields}).status_code == 200
    asked = last_completion(shared, "hello")["grammar"]
    assert (asked["kind"], asked["text"]) == (kind, text)


def test_text_is_no_format(shared: Live) -> None:
    shared.post("/v1/chat/completions", {"model": "hello", "messages": HI, "response_format": {"type": "text"}})
    assert last_completion(shared, "hello")["grammar"] is None


def test_a_runner_that_refuses_a_grammar_is_heard(empty: Live) -> None:
    empty.add("strict", fail_at_piece=0, fail_status=400, fail_text="invalid JSON schema in format: Invalid type: foo")
    with empty.running():
        response = empty.post("/api/chat", {"model": "strict", "messages": HI, "format": {"type": "foo"}})
        # The scripted runner says so in its stream; the real one refuses before it, with the same status and text.
        assert "Invalid type: foo" in response.text


def test_harmony_answers_in_its_final_message(empty: Live) -> None:
    template = (
        "{{ range .Messages }}<|start|>{{ .Role }}<|message|>{{ .Content }}<|end|>{{ end }}<|start|>assistant"
        "{{ if false }}<|channel|>{{ .Thinking }}{{ end }}"
    )
    empty.add("oss", Recipe(template=template), pieces=['{"a"', ": 1}"])
    with empty.running():
        reply = empty.post("/api/chat", {"model": "oss", "messages": HI, "format": "json", "stream": False}).json()
        assert reply["message"]["content"] == '{"a": 1}'
        assert last_completion(empty, "oss")["prompt"].endswith("<|start|>assistant<|channel|>final<|message|>")


# Logprobs.


def entry(token: str, *top: str) -> dict[str, Any]:
    own = {"token": token, "logprob": -1.0, "bytes": list(token.encode())}
    others = [{"token": other, "logprob": -2.0, "bytes": list(other.encode())} for other in top]
    return own | ({"top_logprobs": others} if others else {})


@pytest.mark.parametrize("path", ["/api/generate", "/api/chat"])
def test_each_line_has_its_logprobs(shared: Live, path: str) -> None:
    body = {"model": "hello", "prompt": "x", "messages": HI, "logprobs": True, "top_logprobs": 2}
    *some, last = lines(shared.post(path, body))
    assert [line["logprobs"] for line in some] == [[entry(piece, "?", "?")] for piece in ("Hel", "lo", " world")]
    assert last["done"]
    assert "logprobs" not in last


@pytest.mark.parametrize("path", ["/api/generate", "/api/chat"])
def test_a_whole_answer_has_all(shared: Live, path: str) -> None:
    body = {"model": "hello", "prompt": "x", "messages": HI, "stream": False}
    assert shared.post(path, body | {"logprobs": True}).json()["logprobs"] == [entry(p) for p in ("Hel", "lo", " world")]
    assert "logprobs" not in shared.post(path, body | {"top_logprobs": 3}).json()


def test_what_a_parser_holds_back_does_not_hold_the_end(empty: Live) -> None:
    """The white space after a thought is in no line; its logprobs come with the next one."""
    template = "{{ range .Messages }}{{ if .Thinking }}<hm>{{ .Thinking }}</hm>{{ end }}{{ .Content }}{{ end }}"
    pieces = ["<hm>", "a", "</hm>", "\n\n", "b", "<"]
    empty.add("deep", Recipe(template=template), pieces=pieces)
    with empty.running():
        *some, last = lines(empty.post("/api/chat", {"model": "deep", "messages": HI, "logprobs": True, "format": "json"}))
        assert [e["token"] for line in (*some, last) for e in line.get("logprobs", [])] == pieces
        assert [line["message"].get("thinking") or line["message"]["content"] for line in some] == ["a", "b", "<"]
        asked = last_completion(empty, "deep")["grammar"]
        assert (asked["thinking_begin"], asked["thinking_end"]) == ("<hm>", "</hm>")


def test_openais_logprobs(shared: Live) -> None:
    body = {"model": "hello", "messages": HI, "logprobs": True, "top_logprobs": 1}
    choice = shared.post("/v1/chat/completions", body).json()["choices"][0]
    assert choice["logprobs"] == {"content": [entry(piece, "?") for piece in ("Hel", "lo", " world")]}
    *chunks, done = events(shared.post("/v1/chat/completions", body | {"stream": True}))
    assert done == "[DONE]"
    streamed = [chunk["choices"][0].get("logprobs") for chunk in chunks]
    assert streamed == [{"content": [entry(piece, "?")]} for piece in ("Hel", "lo", " world")] + [None]
    plain = shared.post("/v1/chat/completions", body | {"top_logprobs": 0}).json()["choices"][0]
    assert [e["top_logprobs"] for e in plain["logprobs"]["content"]] == [[], [], []]
    assert "logprobs" not in shared.post("/v1/chat/completions", {"model": "hello", "messages": HI}).json()["choices"][0]
