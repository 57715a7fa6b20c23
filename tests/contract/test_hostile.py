"""Requests that nobody sends by mistake: wrong types, sizes, depths and encodings, values out of all proportion. Each gets an
error that says what is wrong, or an answer; and after each the server answers as before.
"""

from __future__ import annotations

import copy
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.contract.every_kind import DOCUMENTED, serving
from tests.contract.test_embed_routes import Serving
from tests.patience import PATIENCE_S

BRIEF = {"num_predict": 2, "num_ctx": 128}
HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}}
BODIES: dict[str, dict[str, Any]] = {
    "/api/generate": {"model": "chat", "prompt": "Hi", "stream": False, "options": {}, "suffix": "", "context": [], "images": []},
    "/api/chat": {"model": "chat", "messages": HI, "stream": False, "format": "json", "tools": [], "think": False},
    "/api/embed": {"model": "embedder", "input": ["a"], "truncate": True, "dimensions": 4},
    "/api/embeddings": {"model": "embedder", "prompt": "a"},
    "/api/rerank": {"model": "ranker", "query": "a", "documents": ["a", "b"], "top_n": 1},
    "/api/show": {"model": "chat", "verbose": False},
    "/api/copy": {"source": "chat", "destination": "nope/nope:nope"},
    "/api/create": {"model": "made", "from": "nope", "parameters": {}, "messages": [], "files": {}, "stream": False},
    "/v1/chat/completions": {"model": "chat", "messages": HI, "max_tokens": 2, "tools": [TOOL], "tool_choice": "none"},
    "/v1/completions": {"model": "chat", "prompt": "Hi", "max_tokens": 2, "stop": ["x"], "seed": 1},
    "/v1/embeddings": {"model": "embedder", "input": "a", "encoding_format": "base64", "dimensions": 3},
    "/v1/rerank": {"model": "ranker", "query": "a", "documents": ["a"]},
    "/v1/responses": {"model": "chat", "input": "Hi", "max_output_tokens": 2, "tools": [], "text": {}, "reasoning": {}},
    "/v1/messages": {"model": "chat", "messages": HI, "max_tokens": 2, "system": "s", "tools": [], "thinking": {}},
    "/v1/messages/count_tokens": {"model": "chat", "messages": HI},
}
VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    2**31,
    -(2**63),
    2**63,
    10**30,
    1.5,
    -1e308,
    "",
    "x",
    "\x00",
    "\ud800",
    "../../etc/passwd",
    "%s{{.}}{{ 7 * 7 }}<|im_end|>",
    [],
    [None],
    [[]],
    [{}],
    {},
    {"a": {"b": [1]}},
    {"type": "x", "role": 5, "content": {"text": []}, "function": None},
]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("server"), BRIEF) as server:
        yield server


@pytest.fixture(autouse=True)
def still_there(live: Serving) -> Iterator[None]:
    """Whatever was asked, the next request is answered, by the runner too."""
    yield
    reply = live.post("/api/chat", {"model": "chat", "messages": HI, "stream": False})
    assert reply.status_code == 200
    assert reply.json()["done"] is True


def check(response: httpx.Response) -> None:
    """An answer, or an error of a documented shape that does not tell of our inside."""
    if response.status_code == 200:
        return
    error = response.json()["error"]
    text = error["message"] if isinstance(error, dict) else error
    assert text
    assert "Traceback" not in text
    assert not text.startswith("internal"), text
    assert response.status_code in (400, 404, 413) or DOCUMENTED.match(text), (response.status_code, text)


def post(live: Serving, path: str, body: Any) -> httpx.Response:
    content = json.dumps(body).encode()  # escapes what is no Unicode
    return live.client.post(path, content=content)


@pytest.mark.parametrize("path", BODIES)
def test_fields_of_all_types(live: Serving, path: str) -> None:
    for name in BODIES[path]:
        for value in VALUES:
            if name != "keep_alive" and not (name == "destination" and value == "x"):
                check(post(live, path, {**BODIES[path], name: value}))


@pytest.mark.parametrize("path", ["/api/chat", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("field", ["role", "content", "tool_calls", "images", "thinking", "tool_call_id", "type"])
def test_fields_of_messages(live: Serving, path: str, field: str) -> None:
    where = "input" if path == "/v1/responses" else "messages"
    for value in VALUES:
        check(post(live, path, {**BODIES[path], where: [{"role": "assistant", "content": "x", field: value}, *HI]}))


OPTIONS = """num_ctx num_batch num_gpu main_gpu use_mmap num_thread num_keep seed num_predict top_k top_p min_p typical_p
repeat_last_n temperature repeat_penalty presence_penalty frequency_penalty stop ignore_eos think_budget"""


@pytest.mark.parametrize("option", OPTIONS.split())
def test_options_out_of_all_proportion(live: Serving, option: str) -> None:
    limits = {"num_predict": 2} if option != "num_predict" else {}
    values = [-(2**62), -1, 0, 1, 2**31, 2**62, 1e300, -1e300, 1e-300, "5", [], True, ["", "a" * 100_000, "\x00"]]
    for value in values:
        options = {**limits, option: value, "num_ctx": value if option == "num_ctx" else 64}
        check(post(live, "/api/generate", {"model": "chat", "prompt": "Hi", "stream": False, "options": options}))


def nested(depth: int, kind: str) -> bytes:
    begin, end = (b"[", b"]") if kind == "array" else (b'{"a":', b"}")
    return begin * depth + b"1" + end * depth


@pytest.mark.parametrize("depth", [150, 1000, 100_000])
@pytest.mark.parametrize("kind", ["array", "object"])
@pytest.mark.parametrize(
    ("path", "before", "after"),
    [
        ("/api/chat", b'{"model":"chat","stream":false,"messages":[{"role":"user","content":"x"}],"tools":[', b"]}"),
        ("/api/chat", b'{"model":"chat","stream":false,"messages":[{"role":"user","content":"x"}],"format":', b"}"),
        ("/api/chat", b'{"model":"chat","stream":false,"messages":', b"}"),
        ("/api/chat", b"", b""),
        ("/api/generate", b'{"model":"chat","prompt":"x","stream":false,"options":', b"}"),
        ("/api/generate", b'{"model":"chat","prompt":"x","stream":false,"unknown":', b"}"),
        ("/v1/chat/completions", b'{"model":"chat","messages":[{"role":"user","content":', b"}]}"),
        ("/v1/messages", b'{"model":"chat","max_tokens":2,"messages":[{"role":"user","content":"x"}],"system":', b"}"),
        ("/v1/responses", b'{"model":"chat","input":', b"}"),
        ("/api/create", b'{"model":"made","from":"nope","stream":false,"parameters":', b"}"),
    ],
)
def test_depths(live: Serving, path: str, before: bytes, after: bytes, kind: str, depth: int) -> None:
    check(live.client.post(path, content=before + nested(depth, kind) + after))


@pytest.mark.parametrize("path", [*BODIES, "/api/pull", "/api/delete"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x00",
        b"\xff\xfe{\x00}\x00",
        b"\xef\xbb\xbf{}",
        '{"model": "chat"}'.encode("utf-16"),
        b'{"model": "\xff\xfe\x80"}',
        b'{"model": "\\ud83d"}',
        b'{"model": "chat", "model": 5}',
        b'{"MODEL": "nope", "Messages": 5}',
        b'{"model": NaN}',
        b'{"model": 1e99999}',
        b"[" + b"{}," * 1000 + b"{}]",
        b'"text"',
        b"null",
        b"{" + b",".join(b'"%d": %d' % (n, n) for n in range(20_000)) + b"}",
        b'{"model": "' + b"m" * 1_000_000 + b'"}',
        b'{"model": "a\\u0000b"}',
    ],
    ids=lambda body: repr(body[:24]),
)
def test_bodies(live: Serving, path: str, body: bytes) -> None:
    method = "DELETE" if path == "/api/delete" else "POST"
    check(live.client.request(method, path, content=body))


TEN_MB = 10 * 1024 * 1024


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/api/generate", "prompt", "word " * (TEN_MB // 5)),
        ("/api/generate", "prompt", "a" * TEN_MB),
        ("/api/generate", "context", [1] * 1_000_000),
        ("/api/chat", "messages", [{"role": "user", "content": "word " * (TEN_MB // 5)}]),
        ("/api/chat", "messages", [{"role": "user", "content": "hello"}] * 50_000),
        ("/api/chat", "tools", [TOOL] * 10_000),
        ("/api/embed", "input", "word " * (TEN_MB // 5)),
        ("/api/embed", "input", [""] * 1000),
        ("/v1/completions", "stop", ["stop"] * 100_000),
        ("/v1/chat/completions", "messages", [{"role": "system", "content": "word " * (TEN_MB // 5)}, *HI]),
        ("/api/rerank", "query", "word " * (TEN_MB // 50)),
        ("/api/rerank", "documents", ["word " * (TEN_MB // 50), "x"]),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 50 else "",
)
def test_sizes(live: Serving, path: str, field: str, value: Any) -> None:
    check(live.client.post(path, content=json.dumps({**BODIES[path], field: value}).encode(), timeout=PATIENCE_S))


def test_small_requests_do_not_wait_for_huge_ones(live: Serving) -> None:
    body = json.dumps({**BODIES["/api/generate"], "prompt": "word " * (TEN_MB // 5)}).encode()
    with httpx.Client(base_url=live.url, timeout=PATIENCE_S) as other:
        worker = threading.Thread(target=lambda: other.post("/api/generate", content=body))
        worker.start()
        slowest = 0.0
        while worker.is_alive():
            begin = time.monotonic()
            assert live.client.get("/api/version").status_code == 200
            slowest = max(slowest, time.monotonic() - begin)
            time.sleep(0.01)
        worker.join()
    assert slowest < PATIENCE_S / 4


def test_a_body_that_is_announced_too_large_is_refused_before_it_comes(live: Serving) -> None:
    with socket.create_connection(("127.0.0.1", live.port), timeout=PATIENCE_S) as client:
        client.sendall(b"POST /api/generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999999\r\n\r\n{")
        assert client.recv(100).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(
    "head",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /api/chat HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /api/chat HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /api/chat HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /api/tags HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
        b"GET /api/tags HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
        b"GET /api/blobs/../../../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /%00%ff%0d%0a HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: \xff\xfe\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nOrigin: \xff\r\nX-Request-Id: \xff\r\nAuthorization: \xff\r\n\r\n",
    ],
    ids=lambda head: repr(head[:30]),
)
def test_what_is_hardly_http(live: Serving, head: bytes) -> None:
    with socket.create_connection(("127.0.0.1", live.port), timeout=PATIENCE_S) as client:
        client.settimeout(5)
        try:
            client.sendall(head)
            answer = client.recv(200)
        except (TimeoutError, ConnectionError):  # waited for the rest, or hung up
            answer = b""
    assert answer == b"" or re.match(rb"HTTP/1\.1 (200|400|403|404|405|413|414|431) ", answer), answer


@pytest.mark.parametrize(
    "digest",
    [
        "sha256:" + "0" * 64,
        "sha256:short",
        "..",
        "%2e%2e%2fpasswd",
        "sha256-" + "f" * 64,
        "a" * 5000,
        "\x00",
        "sha256:" + "G" * 64,
    ],
)
def test_blobs_that_cannot_be(live: Serving, digest: str) -> None:
    path = "/api/blobs/" + httpx.QueryParams({"d": digest})["d"].replace("\x00", "%00")
    response = live.client.post(path, content=b"not the content")
    assert response.status_code in (400, 404, 405)
    assert live.client.head(path).status_code in (400, 404)


def test_clients_that_leave_in_the_middle(live: Serving) -> None:
    body = json.dumps({**BODIES["/api/generate"], "options": {"num_predict": 10_000}, "stream": True}).encode()
    whole = b"POST /api/generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    for cut in (10, 60, len(whole) - 5, len(whole)):
        with socket.create_connection(("127.0.0.1", live.port), timeout=PATIENCE_S) as client:
            client.sendall(whole[:cut])
    messages = copy.deepcopy(HI)
    assert post(live, "/api/chat", {"model": "chat", "messages": messages, "stream": False}).status_code == 200
