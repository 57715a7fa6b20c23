"""The runner's HTTP door on a real server, over an engine without a model."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from tests.patience import PATIENCE_S, wait_until
from tests.unit.runner.fake_engine import FakeEngine, done

from puna.runner.process.http_server import make_server
from puna.runner.process.main import listen
from puna.runner.transport import http as http_module
from puna.runner.transport.http import Replies
from puna.wire import CompletionReply, Done, Failed, Piece, Reply, decode_reply

KEY = "a-key"
HEAD = f"POST /completion HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n".encode()


@contextmanager
def serving(engine: FakeEngine) -> Iterator[httpx.Client]:
    listener = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = make_server(engine, KEY)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        with httpx.Client(base_url=url, timeout=PATIENCE_S, headers={"authorization": f"Bearer {KEY}"}) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[httpx.Client]:
    with serving(engine) as client:
        yield client


def lines(response: httpx.Response) -> list[CompletionReply]:
    assert response.headers["content-type"] == "application/x-ndjson"
    return [decode_reply(line) for line in response.text.splitlines()]


def test_an_answer_is_its_pieces_and_one_done(client: httpx.Client) -> None:
    replies = lines(client.post("/completion", json={"prompt": "one two \u20ac"}))
    assert [r.content for r in replies if isinstance(r, Piece)] == ["one", "two", "\u20ac"]
    assert replies[3:] == [done("stop", 7)]


def test_pieces_arrive_while_the_engine_computes() -> None:
    """Of an answer that has no end."""
    engine = FakeEngine(step_s=0.05)
    with serving(engine) as client, client.stream("POST", "/completion", json={"prompt": "count 1000000"}) as stream:
        received = stream.iter_lines()
        assert [decode_reply(next(received)) for _ in range(6)] == [Piece(content=f"{i} ") for i in range(6)]
    engine.close()


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        ({"prompt": "refuse"}, 400, "the input length exceeds the context length (9 tokens, context 4)"),
        ({"prompt": "fail"}, 507, "no luck"),
        ({"prompt": 3}, 400, "Expected `str`, got `int` - at `$.prompt`"),
        ({"prompt": "crash"}, 500, "internal error: RuntimeError: a bug"),
    ],
)
def test_errors_before_the_first_piece_have_a_status(client: httpx.Client, body: Any, status: int, error: str) -> None:
    response = client.post("/completion", json=body)
    assert (response.status_code, response.json()) == (status, {"error": error})


def test_errors_after_the_first_piece_are_a_line(client: httpx.Client) -> None:
    assert lines(client.post("/completion", json={"prompt": "fail late"})) == [
        Piece(content="fail"),
        Piece(content="late"),
        Failed(error="late", status=500),
    ]


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        ("launched", 503, "model is not loaded, POST /load first"),
        ("loading", 503, "model is still loading (25%), wait for /health to say ready"),
        ("error", 500, "the weights are gone"),
    ],
)
def test_completions_need_a_loaded_model(status: str, code: int, error: str) -> None:
    engine = FakeEngine(status=status)
    with serving(engine) as client:
        response = client.post("/completion", json={"prompt": "one"})
        assert (response.status_code, response.json()) == (code, {"error": error})
    assert engine.handles == []


def test_load_then_complete() -> None:
    with serving(FakeEngine(status="launched")) as client:
        assert client.get("/health").json()["status"] == "launched"
        assert client.post("/tokenize", json={"content": "a"}).status_code == 503
        refused = client.post("/load", json={"options": {"n_ctx": 2_000_000}})
        assert (refused.status_code, refused.json()["success"]) == (200, False)
        loaded = client.post("/load", json={"operation": "commit", "options": {"n_ctx": 2048}})
        assert (loaded.json()["success"], loaded.json()["n_ctx"]) == (True, 2048)
        assert client.get("/health").json()["status"] == "ready"
        assert client.post("/completion", json={"prompt": "one"}).status_code == 200
        assert client.post("/load", json={"operation": "burn"}).status_code == 400


def test_tokenize_and_detokenize(client: httpx.Client) -> None:
    assert client.post("/tokenize", json={"content": "ab"}).json() == {"tokens": [1, 97, 98]}
    assert client.post("/tokenize", json={"content": "ab", "add_special": False}).json() == {"tokens": [97, 98]}
    assert client.post("/detokenize", json={"tokens": [97, 98]}).json() == {"content": "ab"}
    response = client.post("/detokenize", json={"tokens": [999]})
    assert (response.status_code, response.json()) == (400, {"error": "token 999 is not in the vocabulary"})


def test_unknown_paths_and_methods_answer_in_json(client: httpx.Client) -> None:
    assert (client.get("/nothing").status_code, client.get("/nothing").json()) == (404, {"error": "Not Found"})
    assert (client.get("/completion").status_code, client.get("/completion").json()) == (405, {"error": "Method Not Allowed"})


def test_a_body_that_is_too_large_is_refused(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "MAX_BODY_BYTES", 1000)
    for path in ("/completion", "/load", "/tokenize", "/detokenize"):
        assert client.post(path, content=b"{" + b" " * 1000).status_code == 413


@pytest.mark.parametrize("given", ["", "Bearer", "Bearer another", "a-key", "Basic a-key", "Bearer a-key2"])
@pytest.mark.parametrize("path", ["/completion", "/load", "/embedding", "/tokenize", "/health", "/metrics", "/nothing"])
def test_without_the_key_nothing_is_had(client: httpx.Client, engine: FakeEngine, path: str, given: str) -> None:
    body = {"operation": "close", "prompt": "one", "inputs": ["a"], "content": "a"}
    response = client.request(
        "GET" if path in ("/health", "/metrics") else "POST", path, json=body, headers={"authorization": given}
    )
    assert response.status_code == 401
    assert "key" in response.json()["error"]
    assert engine.handles == []
    assert engine.is_loaded


def test_metrics_count_what_happened(client: httpx.Client) -> None:
    for prompt in ("one two", "fail", "fail late", "refuse"):
        client.post("/completion", json={"prompt": prompt})
    with client.stream("POST", "/completion", json={"prompt": "flood"}) as stream:
        next(stream.iter_raw())
    wait_until(lambda: "cancelled" in client.get("/metrics").json()["completions"])
    metrics = client.get("/metrics").json()
    assert metrics["status"] == "ready"
    assert metrics["completions"] == {
        "requests": 5,
        "stop": 1,
        "failed": 3,
        "cancelled": 1,
        "prompt_tokens": 6,
        "cached_tokens": 2,
        "generated_tokens": 7,
    }


@pytest.mark.parametrize("prompt", ["silent", "count 10000000"])
def test_a_client_that_leaves_cancels_at_once(client: httpx.Client, engine: FakeEngine, prompt: str) -> None:
    """Also while the prompt is still computed and there is nothing to send."""
    address = (str(client.base_url.host), client.base_url.port or 0)
    body = json.dumps({"prompt": prompt}).encode()
    with socket.create_connection(address) as connection:
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: engine.handles)
        if prompt != "silent":
            assert connection.recv(10).startswith(b"HTTP/1.1")
        assert engine.handles[0].cancelled_at == 0
    wait_until(lambda: engine.handles[0].cancelled_at)


def test_a_client_that_leaves_before_its_body_is_complete_costs_nothing(client: httpx.Client, engine: FakeEngine) -> None:
    address = (str(client.base_url.host), client.base_url.port or 0)
    with socket.create_connection(address) as connection:
        connection.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
    assert lines(client.post("/completion", json={"prompt": "one"}))[0] == Piece(content="one")
    assert len(engine.handles) == 1


def test_a_reader_who_does_not_read_delays_nobody_and_fails_in_the_end(
    client: httpx.Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Replies.__init__
    monkeypatch.setattr(Replies, "__init__", lambda self, loop, full: original(self, loop, full, max_queued=2_000_000))
    with client.stream("POST", "/completion", json={"prompt": "flood"}) as stream:
        wait_until(lambda: engine.handles)
        assert len(lines(client.post("/completion", json={"prompt": "count 50"}))) == 51
        wait_until(lambda: engine.handles[0].cancelled_at)
        replies = [decode_reply(line) for line in stream.iter_lines()]
    assert replies[-1] == Failed(error="the client has left 2000000 characters unread", status=500)
    assert all(isinstance(reply, Piece) for reply in replies[:-1])


def test_fifty_requests_at_once_end_exactly_once_each(client: httpx.Client) -> None:
    prompts = ["one two three", "count 40", "fail late", "count 3", "count 200"] * 10

    async def ask(session: httpx.AsyncClient, prompt: str) -> list[CompletionReply]:
        return lines(await session.post("/completion", json={"prompt": prompt}))

    async def ask_all() -> list[list[CompletionReply]]:
        async with httpx.AsyncClient(base_url=client.base_url, headers=client.headers, timeout=PATIENCE_S) as session:
            return await asyncio.gather(*(ask(session, prompt) for prompt in prompts))

    for prompt, replies in zip(prompts, asyncio.run(ask_all()), strict=True):
        terminal = [reply for reply in replies if not isinstance(reply, Piece)]
        assert terminal == [replies[-1]]
        assert isinstance(replies[-1], Failed if prompt == "fail late" else Done)
        if prompt.startswith("count"):
            assert [r.content for r in replies if isinstance(r, Piece)] == [f"{i} " for i in range(int(prompt.split()[1]))]


def test_streams_get_their_terminal_line_when_the_server_ends(engine: FakeEngine) -> None:
    with serving(engine) as client, client.stream("POST", "/completion", json={"prompt": "count 1000000"}) as stream:
        received = stream.iter_lines()
        next(received)
        closing = threading.Thread(target=engine.close)
        closing.start()
        assert decode_reply(list(received)[-1]) == Failed(error="the runner is ending", status=503)
        closing.join()


def test_replies_survive_any_interleaving_of_threads() -> None:
    """No reply is lost or doubled when the engine and the reader race for every one of them."""
    n = 20000

    async def read() -> list[Reply]:
        replies = Replies(asyncio.get_running_loop(), lambda: None)

        def produce() -> None:
            for i in range(n):
                replies.emit(Piece(content=str(i)))
                if i % 7 == 0:
                    time.sleep(0)
            replies.emit(done("stop"))
            replies.emit(done("stop"))

        thread = threading.Thread(target=produce)
        thread.start()
        result: list[Reply] = []
        while not result or isinstance(result[-1], Piece):
            result += await replies.take()
        thread.join()
        return result

    result = asyncio.run(asyncio.wait_for(read(), PATIENCE_S))
    assert result == [*(Piece(content=str(i)) for i in range(n)), done("stop")]


def test_a_reply_after_the_event_loop_is_closed_is_dropped() -> None:
    async def make() -> Replies:
        replies = Replies(asyncio.get_running_loop(), lambda: None)
        take = asyncio.create_task(replies.take())
        await asyncio.sleep(0)
        take.cancel()
        return replies

    asyncio.run(make()).emit(Piece(content="late"))
