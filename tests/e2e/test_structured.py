"""Structured output and logprobs through a server process, with the official clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import ollama
import openai
import pytest

from tests.e2e.test_first_light import Server, serving
from tests.tiny import write_llama

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "colour": {"enum": ["red", "green", "blue"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "colour", "age"],
    "additionalProperties": False,
}
HI: Any = [{"role": "user", "content": "Describe a dog"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("structured")
    with serving(folder) as running:
        path = write_llama(folder / "tiny.gguf", seed=5, n_layers=1, n_embd=64, n_ff=64)
        with ollama.Client(running.url) as client:
            client.create("tiny", files={"tiny.gguf": client.create_blob(path)})
        yield running


def test_the_ollama_client(server: Server) -> None:
    options = {"temperature": 1.0, "seed": 1, "num_ctx": 1024}
    with ollama.Client(server.url) as client:
        chat = client.chat("tiny", HI, format=SCHEMA, options=options)
        jsonschema.validate(json.loads(chat.message.content or ""), SCHEMA)
        generate = client.generate("tiny", "a dog", format=SCHEMA, options=options, logprobs=True, top_logprobs=2)
        jsonschema.validate(json.loads(generate.response or ""), SCHEMA)
        assert generate.logprobs
        assert all(entry.logprob <= 0 for entry in generate.logprobs)
        assert all(len(entry.top_logprobs or []) == 2 for entry in generate.logprobs)
        streamed = list(client.chat("tiny", HI, format=SCHEMA, options=options, stream=True, logprobs=True))
        assert sum(len(part.logprobs or []) for part in streamed) == streamed[-1].eval_count


def test_the_openai_client(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-") as client:
        wanted: Any = {"type": "json_schema", "json_schema": {"name": "dog", "schema": SCHEMA}}
        answer = client.chat.completions.create(
            model="tiny", messages=HI, response_format=wanted, logprobs=True, top_logprobs=3, seed=2
        )
        choice = answer.choices[0]
        jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)
        assert choice.finish_reason == "stop"
        assert choice.logprobs
        assert choice.logprobs.content
        assert bytes(b for entry in choice.logprobs.content for b in entry.bytes or []).decode() == choice.message.content
        assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)
        number = client.chat.completions.create(model="tiny", messages=HI, extra_body={"regex": r"-?[1-9][0-9]{0,3}\."})
        assert float(number.choices[0].message.content or "")
        lark = {"lark": 'start: "bow-" "wow"+ "!"'}
        word = client.completions.create(model="tiny", prompt="a dog", extra_body=lark, max_tokens=200)
        assert word.choices[0].text.startswith("bow-w")
        wrong: Any = {"type": "json_schema", "json_schema": {"name": "dog", "schema": {"type": "dog"}}}
        with pytest.raises(openai.BadRequestError, match="invalid JSON schema in format: Invalid type: dog"):
            client.chat.completions.create(model="tiny", messages=HI, response_format=wrong)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"format": {"type": "dog"}}, "invalid JSON schema in format: Invalid type: dog"),
        ({"regex": "("}, "invalid regex: "),
        ({"lark": "start: x"}, "invalid Lark grammar: "),
        ({"format": {"multipleOf": 999983}}, "invalid JSON schema in format: multipleOf"),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_a_bad_request(server: Server, fields: dict[str, Any], text: str) -> None:
    response = server.client.post("/api/generate", json={"model": "tiny", "prompt": "x", **fields})
    assert response.status_code == 400
    assert response.json()["error"].startswith(text)
