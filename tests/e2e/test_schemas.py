"""A real model and a hundred random JSON schemas: whatever it would rather say, what it says validates."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from puna.store.store import Store
from tests.conftest import STARTER
from tests.e2e.test_first_light import Server, serving

N_SCHEMAS = 100
WORDS = ["name", "age", "colour", "address", "is_open", "größe", "next day", "tags", "x", "ID"]


def leaf(chance: random.Random) -> dict[str, Any]:
    low = chance.randint(-50, 50)
    return chance.choice(
        [
            {"type": "string", "maxLength": chance.randint(1, 16)},
            {"type": "string", "minLength": 2, "maxLength": 12},
            {"type": "string", "pattern": chance.choice([r"^[A-Z][a-z]{2,8}$", r"^\d{3}-\d{4}$", r"^(red|green|blue)$"])},
            {"type": "string", "format": chance.choice(["date", "uuid", "ipv4"])},
            {"type": "integer", "minimum": low, "maximum": low + chance.randint(0, 500)},
            {"type": "boolean"},
            {"type": "null"},
            {"enum": chance.sample(["yes", "no", 1, 2.5, None, [1, 2], {"a": "b"}], 3)},
            {"const": chance.choice(["exactly", 7, [True, None]])},
            {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 9}]},
        ]
    )


def schema(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    kind = "object" if depth == 0 else chance.choice(["leaf", "leaf", "object", "array"]) if depth < 3 else "leaf"
    if kind == "leaf":
        return leaf(chance)
    if kind == "array":
        n = chance.randint(0, 2)
        return {"type": "array", "items": schema(chance, depth + 1), "minItems": n, "maxItems": n + chance.randint(0, 1)}
    names = chance.sample(WORDS, chance.randint(1, 4 - depth))
    return {
        "type": "object",
        "properties": {name: schema(chance, depth + 1) for name in names},
        "required": chance.sample(names, chance.randint(0, len(names))),
        "additionalProperties": False,
    }


def with_reference(chance: random.Random) -> dict[str, Any]:
    return {
        "$defs": {"part": schema(chance, 2)},
        "type": "object",
        "properties": {
            "first": {"$ref": "#/$defs/part"},
            "rest": {"type": "array", "items": {"$ref": "#/$defs/part"}, "maxItems": 2},
        },
        "required": ["first", "rest"],
        "additionalProperties": False,
    }


@pytest.fixture(scope="module")
def server(starter_store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environ = {"OLLAMA_MODELS": str(starter_store.blobs.folder.parent), "OLLAMA_NUM_PARALLEL": "8"}
    with serving(tmp_path_factory.mktemp("schemas"), **environ) as running:
        yield running


@pytest.mark.thorough
def test_a_hundred_random_schemas(server: Server) -> None:
    wanted = [with_reference(random.Random(n)) if n % 10 == 0 else schema(random.Random(n)) for n in range(N_SCHEMAS)]

    def answer(number: int) -> dict[str, Any]:
        options = {"temperature": 1.0, "seed": number, "num_ctx": 1024}
        return server.chat(STARTER, "Invent a record as JSON.", format=wanted[number], options=options)

    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(answer, range(N_SCHEMAS)))
    for given, reply in zip(wanted, replies, strict=True):
        text = reply["message"]["content"]
        assert reply["done_reason"] == "stop", (given, text)
        jsonschema.validate(json.loads(text), given, format_checker=jsonschema.FormatChecker())
    assert len({reply["message"]["content"] for reply in replies}) > N_SCHEMAS / 2, "it is the model that fills them in"
