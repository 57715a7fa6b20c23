"""In every API a conversation whose last message is the assistant's is continued, and an answer says what it did without."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.server.apis.test_native import HI, lines
from tests.unit.server.apis.test_openai import events
from tests.unit.server.live import Live

BEGUN = [*HI, {"role": "assistant", "content": "The sky is"}]
ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "The sky is"}]},
]
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "native": ("/api/chat", {"messages": BEGUN, "stream": False}),
    "openai": ("/v1/chat/completions", {"messages": BEGUN}),
    "anthropic": ("/v1/messages", {"messages": BEGUN, "max_tokens": 5}),
    "responses": ("/v1/responses", {"input": ITEMS}),
}


@pytest.mark.parametrize(("path", "body"), REQUESTS.values(), ids=REQUESTS)
def test_an_answer_that_was_begun_goes_on(empty: Live, path: str, body: dict[str, Any]) -> None:
    script = empty.add("hello")
    with empty.running():
        assert empty.post(path, {"model": "hello", **body}).status_code == 200
    (request,) = empty.completions(script)
    assert request["prompt"].endswith("<|im_start|>assistant\nThe sky is")
    assert request["prompt"].count("assistant") == 1


@pytest.mark.parametrize("path", ["/api/chat", "/v1/chat/completions"])
def test_what_a_client_asks_for_counts(empty: Live, path: str) -> None:
    script = empty.add("hello", template=None)
    with empty.running():
        for more in (
            {"add_generation_prompt": True},
            {"add_generation_prompt": False},
            {"add_generation_prompt": False, "continue_final_message": True},
        ):
            assert empty.post(path, {"model": "hello", "messages": BEGUN, "stream": False, **more}).status_code == 200
        refused = empty.post(
            path, {"model": "hello", "messages": BEGUN, "add_generation_prompt": True, "continue_final_message": True}
        )
        assert refused.status_code == 400
        assert "exclude each other" in refused.text
    anew, closed, continued = (request["prompt"] for request in empty.completions(script))
    assert anew.endswith("assistant\nThe sky is<|im_end|>\n<|im_start|>assistant\n")
    assert closed.endswith("assistant\nThe sky is<|im_end|>\n")
    assert continued.endswith("assistant\nThe sky is")


FAILS_ON_TOOLS = "{{ range .Messages }}{{ .Content }}{{ end }}{{ range .Tools }}{{ .Nothing }}{{ end }}"
TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "native": ("/api/chat", {"messages": HI, "stream": False, "tools": [TOOL]}),
    "openai": ("/v1/chat/completions", {"messages": HI, "tools": [TOOL]}),
    "anthropic": (
        "/v1/messages",
        {"messages": HI, "max_tokens": 5, "tools": [{"name": "f", "input_schema": {"type": "object"}}]},
    ),
    "responses": ("/v1/responses", {"input": "Hi", "tools": [{"type": "function", "name": "f", "parameters": {}}]}),
}


@pytest.mark.parametrize(("path", "body"), ASKED.values(), ids=ASKED)
def test_tools_on_which_a_template_fails_are_left_out_and_the_answer_says_so(
    empty: Live, path: str, body: dict[str, Any]
) -> None:
    script = empty.add("hello", template=FAILS_ON_TOOLS)
    with empty.running():
        reply = empty.post(path, {"model": "hello", **body}).json()
        assert "does not know of the tools, on which its template fails: template, line 1" in reply["warnings"][0]
        plain = {key: value for key, value in body.items() if key != "tools"}
        assert "warnings" not in empty.post(path, {"model": "hello", **plain}).json()
    first, second = empty.completions(script)
    assert first["prompt"] == second["prompt"]


def test_streams_say_so_too(empty: Live) -> None:
    empty.add("hello", template=FAILS_ON_TOOLS)
    with empty.running():
        *_, last = lines(empty.post("/api/chat", {"model": "hello", "messages": HI, "tools": [TOOL]}))
        assert len(last["warnings"]) == 1
        found = events(empty.post("/v1/chat/completions", {"model": "hello", "messages": HI, "tools": [TOOL], "stream": True}))
        assert [len(event["warnings"]) for event in found if "warnings" in event] == [1]
