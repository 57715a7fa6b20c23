from __future__ import annotations

import json
import socket

import pytest

from puna.server import bodies
from tests.unit.server.live import Live


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "missing request body"),
        (b" \n", "missing request body"),
        (b"x", "invalid character 'x' looking for beginning of value"),
        (b"{", "unexpected EOF"),
        (b'{"model": "a', "unexpected EOF"),
        (b"{model: 1}", "invalid character 'm' looking for beginning of object key string"),
        (b'{"model" 1}', "invalid character '1' after object key"),
        (b'{"model": "a" "b"}', "invalid character '\"' after object key:value pair"),
        (b'{"model": NaN}', "invalid character 'N' looking for beginning of value"),
        (b"[]", "json: cannot unmarshal array into Go value of type api.GenerateRequest"),
        (b'{"model": 5}', "json: cannot unmarshal number into Go struct field GenerateRequest.model of type string"),
        (b'{"stream": "yes"}', "json: cannot unmarshal string into Go struct field GenerateRequest.stream of type bool"),
        (b'{"context": ["a"]}', "json: cannot unmarshal string into Go struct field GenerateRequest.context of type int"),
        (
            b'{"options": []}',
            "json: cannot unmarshal array into Go struct field GenerateRequest.options of type map[string]interface {}",
        ),
        (b'{"images": ["***"]}', "illegal base64 data in images: Only base64 data is allowed"),
        (b"[" * 100_000, "exceeded max depth"),
        (b'{"model": ' + b"[" * 201 + b"]" * 201 + b"}", "exceeded max depth"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "json: cannot unmarshal number 99999"),
        (b'{"top_logprobs": 1e999}', "json: cannot unmarshal number 1e999 into Go value of type float64"),
        (b'{"top_logprobs": 99999999999999999999}', "json: cannot unmarshal number 1e+20 into Go struct field GenerateRequest"),
        (b'{"top_logprobs": -9223372036854775809}', "json: cannot unmarshal number -9.2"),
    ],
)
def test_bodies_that_cannot_be_read(shared: Live, body: bytes, text: str) -> None:
    response = shared.client.post("/api/generate", content=body)
    assert response.status_code == 400
    assert response.json()["error"].startswith(text)


def test_nested_fields_are_named(shared: Live) -> None:
    response = shared.post("/api/chat", {"model": "hello", "messages": [{"role": "user", "content": 5}]})
    expected = "json: cannot unmarshal number into Go struct field ChatRequest.messages.content of type string"
    assert response.json() == {"error": expected}


@pytest.mark.parametrize(
    "body",
    [
        {"MODEL": "hello", "Prompt": "x", "STREAM": False},
        {"model": "hello", "Model": "other", "prompt": "x", "stream": False},
        {
            "model": "hello",
            "prompt": "x",
            "stream": False,
            "system": None,
            "options": None,
            "keep_alive": None,
            "new": {"a": [1]},
        },
    ],
)
def test_field_names_in_any_case_nulls_and_unknown_fields(shared: Live, body: dict[str, object]) -> None:
    assert shared.post("/api/generate", body).json()["response"] == "Hello world"


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_any_content_type(shared: Live, content_type: str) -> None:
    body = json.dumps({"model": "hello", "prompt": "x", "stream": False}) + " trailing"
    response = shared.client.post("/api/generate", content=body, headers={"content-type": content_type})
    assert response.json()["response"] == "Hello world"


def test_half_a_surrogate_pair_is_replaced(shared: Live) -> None:
    body = b'{"model": "hello", "raw": true, "stream": false, "prompt": "a\\ud800b \\ud83d\\ude00 \xff"}'
    assert shared.client.post("/api/generate", content=body).status_code == 200
    path = shared.store.get("hello").model_path
    assert path is not None
    assert shared.completions(shared.scripts[path])[-1]["prompt"] == "a\ufffdb 😀 \ufffd"


def test_a_body_that_is_too_large(shared: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies.read_body, "__defaults__", (1000,))
    announced = shared.client.post("/api/generate", content=b" " * 2000)
    assert (announced.status_code, announced.json()) == (413, {"error": "http: request body too large"})
    in_chunks = shared.client.post("/api/generate", content=iter([b" " * 600] * 3))
    assert in_chunks.status_code == 413


def test_a_client_that_leaves_in_the_middle_of_its_body(shared: Live) -> None:
    with socket.create_connection(("127.0.0.1", shared.port)) as connection:
        connection.sendall(b"POST /api/generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
    assert shared.client.get("/").status_code == 200
