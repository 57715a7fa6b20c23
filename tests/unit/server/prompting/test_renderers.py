"""RENDERER and PARSER of a Modelfile, through the server."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from puna.store.models.model import StoredModel
from puna.store.recipe import Recipe
from puna.store.store import Store
from tests.unit.server.apis.test_native import HI
from tests.unit.server.live import Live

TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Now", "parameters": {"type": "object", "properties": {"city": {}}}},
}
PIECES = [
    "Let me see.\n<tool_",
    "call>\n<function=weather>\n<parameter=city>\nOs",
    "lo\n</parameter>\n</function>\n</tool",
    "_call>",
]


def test_a_model_with_both_is_asked_and_read_as_its_family(empty: Live) -> None:
    script = empty.add("coder", Recipe(renderer="qwen3-coder", parser="qwen3-coder"), template=None, pieces=PIECES)
    with empty.running():
        shown = empty.post("/api/show", {"model": "coder"}).json()
        assert shown["capabilities"] == ["completion", "tools"]
        reply = empty.post("/api/chat", {"model": "coder", "messages": HI, "tools": [TOOL], "stream": False}).json()
        assert reply["message"]["content"] == "Let me see.\n"
        (call,) = reply["message"]["tool_calls"]
        assert (call["function"]["name"], call["function"]["arguments"]) == ("weather", {"city": "Oslo"})
        refused = empty.post("/api/chat", {"model": "coder", "messages": HI, "think": True})
        assert (refused.status_code, "does not support thinking" in refused.text) == (400, True)
        own = {"model": "coder", "prompt": "x", "template": "[{{ .Prompt }}]", "stream": False}
        assert empty.post("/api/generate", own).status_code == 200
    first, second = empty.completions(script)
    assert "<tools>\n<function>\n<name>weather</name>" in first["prompt"]
    assert first["prompt"].endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert second["prompt"] == "[x]", "a request's template counts more"


def test_names_that_are_not_known(empty: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    script = empty.add("other", template=None)
    get = Store.get

    def pulled(store: Store, name: str) -> StoredModel:
        """As from a registry, whose models may name what is not known here."""
        model = get(store, name)
        return replace(model, config=msgspec.structs.replace(model.config, renderer="nobody", parser="nobody"))

    with empty.running():
        created = empty.post("/api/create", {"model": "x", "from": "other", "renderer": "nobody", "stream": False})
        assert created.status_code == 400
        assert 'unknown renderer "nobody"' in created.json()["error"]
        monkeypatch.setattr(Store, "get", pulled)
        assert empty.post("/api/show", {"model": "other"}).json()["capabilities"] == ["completion"]
        chat = empty.post("/api/chat", {"model": "other", "messages": HI})
        assert chat.status_code == 400
        assert 'unknown renderer "nobody"' in chat.json()["error"]
    assert not empty.completions(script)
