"""POST /embedding of a runner on a real server, over an engine without a model."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import httpx
import pytest
from tests.patience import wait_until
from tests.unit.runner.fake_engine import FakeEngine
from tests.unit.runner.transport.test_http import HEAD, serving


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[httpx.Client]:
    with serving(engine) as client:
        yield client


def test_the_reply_has_a_vector_per_input(client: httpx.Client) -> None:
    response = client.post("/embedding", json={"inputs": ["a", [1, 2, 3]]})
    assert response.status_code == 200
    assert response.json() == {
        "embeddings": [[1.0, 0.5], [3.0, 0.5]],
        "prompt_eval_count": 7,
        "truncated_count": 0,
        "has_probabilities": False,
    }
    assert client.get("/metrics").json()["completions"] == {"embedding_requests": 1, "embedded_tokens": 7}


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        ({"inputs": ["refuse"]}, 501, "this model does not support embeddings"),
        ({"inputs": ["fail"]}, 507, "no luck"),
        ({"inputs": [1]}, 400, "Expected `str | array`, got `int` - at `$.inputs[0]`"),
        ({}, 400, "Object missing required field `inputs`"),
    ],
)
def test_what_fails_has_a_status_of_its_own(client: httpx.Client, body: object, status: int, error: str) -> None:
    response = client.post("/embedding", json=body)
    assert response.status_code == status
    assert response.json() == {"error": error}


def test_a_client_that_leaves_cancels(client: httpx.Client, engine: FakeEngine) -> None:
    body = b'{"inputs": ["silent"]}'
    head = HEAD.replace(b"/completion", b"/embedding") + b"Content-Length: %d\r\n\r\n" % len(body)
    with socket.create_connection(("127.0.0.1", client.base_url.port or 0)) as leaving:
        leaving.sendall(head + body)
        wait_until(lambda: engine.handles)
    wait_until(lambda: engine.handles[0].cancelled_at)


def test_before_the_model_is_ready_nothing_is_taken(engine: FakeEngine) -> None:
    with serving(FakeEngine(status="loading")) as client:
        assert client.post("/embedding", json={"inputs": ["a"]}).status_code == 503
