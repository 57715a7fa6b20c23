from __future__ import annotations

import json
import socket
import threading
from typing import Any

import httpx
import pytest
import zstandard

from puna.api import go_json
from puna.server.http import bodies
from tests.patience import PATIENCE_S, wait_until
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


def test_a_long_body_keeps_nobody_waiting(shared: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its decoding nor its checks: the server answers others in the middle of both."""
    may_go_on = threading.Event()
    was_asked: list[int] = []
    original = go_json.loads

    def slow(body: bytes) -> Any:
        was_asked.append(len(body))
        may_go_on.wait(PATIENCE_S / 2)
        return original(body)

    monkeypatch.setattr(go_json, "loads", slow)
    answers: list[httpx.Response] = []
    body = {"model": "hello", "prompt": "x", "context": [1] * 1_000_000, "stream": False}
    asking = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{shared.url}/api/generate", json=body, timeout=PATIENCE_S))
    )
    asking.start()
    wait_until(lambda: was_asked)
    try:
        assert httpx.get(f"{shared.url}/health", timeout=PATIENCE_S / 4).status_code == 200
    finally:
        may_go_on.set()
        asking.join(PATIENCE_S)
    assert answers[0].json()["prompt_eval_count"] > 1_000_000


@pytest.mark.parametrize(
    "values",
    [
        "1," * (go_json.MAX_VALUES + 1),
        '"",' * (go_json.MAX_VALUES + 1),
        '"\\"",' * (go_json.MAX_VALUES + 1),
        "[]," * (go_json.MAX_VALUES + 1),
    ],
    ids=["numbers", "texts", "escaped texts", "lists"],
)
def test_a_body_of_too_many_values_is_refused(shared: Live, values: str) -> None:
    response = shared.client.post("/api/generate", content=f'{{"model": "hello", "context": [{values}1]}}')
    assert response.status_code == 400
    assert response.json() == {"error": f"the request body has more than {go_json.MAX_VALUES} values"}


def test_a_long_text_may_hold_any_number_of_commas(shared: Live) -> None:
    prompt = 'a, "b", \\, ' * 500_000
    response = shared.post("/api/generate", {"model": "hello", "prompt": prompt, "raw": True, "stream": False})
    assert response.json()["prompt_eval_count"] == len(prompt.split())


def test_all_bodies_together_have_a_bound(shared: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_IN_FLIGHT", 1_000_000)
    long = {"model": "hello", "prompt": "x" * 400_000, "raw": True, "stream": False}
    short = {"model": "hello", "prompt": "x" * 1000, "raw": True, "stream": False}
    head = b"POST /api/generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: 900000\r\n\r\n"
    assert shared.post("/api/generate", long).status_code == 200
    taken: list[int] = []
    take = bodies.Share.take

    def spy(share: bodies.Share, n_bytes: int) -> None:
        take(share, n_bytes)
        taken.append(n_bytes)

    monkeypatch.setattr(bodies.Share, "take", spy)
    with socket.create_connection(("127.0.0.1", shared.port)) as slow:
        slow.sendall(head + b"x" * 800_000)
        wait_until(lambda: sum(taken) == 800_000)
        refused = shared.post("/api/generate", long)
        assert refused.status_code == 503
        assert "too many large request bodies" in refused.json()["error"]
        assert refused.headers["retry-after"] == "1"
        assert shared.post("/api/generate", short).status_code == 200
    wait_until(lambda: shared.post("/api/generate", long).status_code == 200)


def test_what_json_allows_is_read_alike_in_both_ways() -> None:
    """The fast way and the one that knows Go's rules."""
    values = [0, -1, 1.5, "a\u20ac\U0001f600", True, None, [], {}, {"a": [1, {"b": "c"}]}, "\\u0041", 2**63 - 1, -(2**63)]
    for value in values:
        body = json.dumps(value).encode()
        assert go_json.loads(body) == go_json._loads_as_go_does(body) == value
    assert isinstance(go_json.loads(str(2**63).encode()), float)
    assert go_json.loads(b'{"a": 1} and more') == {"a": 1}
    assert go_json.loads(b'"\\ud800"') == "\ufffd"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/v1/embeddings"])
def test_bodies_may_come_compressed(shared: Live, path: str) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    body = {"model": "hello", "messages": messages, "prompt": "Hi", "input": "Hi", "max_tokens": 9}
    plain = shared.post(path, body)
    headers = {"content-encoding": "zstd"}
    packed = zstandard.compress(json.dumps(body).encode())
    response = shared.client.post(path, content=packed, headers=headers)
    assert (response.status_code, len(response.text)) == (plain.status_code, len(plain.text))
    bomb = zstandard.compress(b" " * (bodies.MAX_DECOMPRESSED + 1))
    text = "failed to decompress zstd body" if path == "/v1/responses" else "failed to decompress request body"
    wide = zstandard.ZstdCompressor(compression_params=zstandard.ZstdCompressionParameters(window_log=24)).compress(
        b"x" * (20 << 20)
    )
    for broken in (bomb, b"{}", packed[:-5], wide):
        refused = shared.client.post(path, content=broken, headers=headers)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == text


def test_only_bodies_of_openais_apis_may_come_compressed(shared: Live) -> None:
    packed = zstandard.compress(json.dumps({"model": "hello", "prompt": "Hi", "stream": False}).encode())
    response = shared.client.post("/api/generate", content=packed, headers={"content-encoding": "zstd"})
    assert response.status_code == 400
