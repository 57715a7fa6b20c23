from __future__ import annotations

import socket
from pathlib import Path

import pytest

from puna.server.http.middleware import Origins, without_port
from puna.settings import Address
from tests.unit.server.live import Live


@pytest.mark.parametrize(
    ("configured", "origin", "allowed"),
    [
        ((), "http://localhost", True),
        ((), "https://127.0.0.1:3000", True),
        ((), "http://0.0.0.0:1", True),
        ((), "HTTP://LOCALHOST:8080", True),
        ((), "app://obsidian.md", True),
        ((), "tauri://localhost", True),
        ((), "vscode-webview://abc", True),
        ((), "http://example.com", False),
        ((), "http://localhost.evil.com", False),
        ((), "https://evil.com/http://localhost", False),
        ((), "null", False),
        ((), "chrome-extension://abc", False),
        (("chrome-extension://*",), "chrome-extension://abc", True),
        (("http://*.example.com",), "http://a.example.com", True),
        (("http://*.example.com",), "http://example.org", False),
        (("http://a.b",), "http://aXb", False),
        (("*",), "http://anything", True),
        (("no-origin",), "no-origin", False),
    ],
)
def test_origins(configured: tuple[str, ...], origin: str, allowed: bool) -> None:
    assert Origins(configured).allow(origin) is allowed


def test_a_malformed_origin_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    Origins(("example.com",))
    assert "'example.com' is no origin" in caplog.text


def test_cors(shared: Live) -> None:
    get = shared.client.get
    assert "access-control-allow-origin" not in get("/api/version").headers
    allowed = get("/api/version", headers={"origin": "http://localhost:3000"})
    assert allowed.headers["access-control-allow-origin"] == "http://localhost:3000"
    assert allowed.headers["vary"] == "Origin"
    refused = get("/api/version", headers={"origin": "http://example.com"})
    assert (refused.status_code, refused.content) == (403, b"")
    same = get("/api/version", headers={"origin": shared.url})
    assert same.status_code == 200
    assert "access-control-allow-origin" not in same.headers
    preflight = shared.client.options("/api/chat", headers={"origin": "http://localhost"})
    assert preflight.status_code == 204
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "x-stainless-os" in preflight.headers["access-control-allow-headers"]
    assert preflight.headers["access-control-max-age"] == "43200"


def test_errors_carry_cors_headers_too(shared: Live) -> None:
    response = shared.client.post("/api/chat", json={}, headers={"origin": "http://localhost"})
    assert response.status_code == 400
    assert response.headers["access-control-allow-origin"] == "http://localhost"


def test_all_origins(tmp_path: Path) -> None:
    live = Live(tmp_path, origins=("*",))
    with live.running():
        response = live.client.get("/", headers={"origin": "http://example.com"})
        assert response.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:11434", 200),
        ("127.0.0.1", 200),
        ("127.9.9.9:80", 200),
        ("192.168.1.7:11434", 200),
        ("0.0.0.0", 200),
        ("[::1]:11434", 200),
        (socket.gethostname(), 200),
        ("Puna.LOCAL", 200),
        ("host.docker.internal", 200),
        ("a.localhost", 200),
        ("", 200),
        ("example.com", 403),
        ("8.8.8.8", 403),
        ("localhost.evil.com", 403),
        ("127.0.0.1.evil.com", 403),
    ],
)
def test_host_names_on_loopback(shared: Live, host: str, status: int) -> None:
    response = shared.client.get("/", headers={"host": host})
    assert response.status_code == status
    assert response.content == (b"Ollama is running" if status == 200 else b"")


def test_options_for_a_name_of_this_machine(shared: Live) -> None:
    assert shared.client.options("/api/chat", headers={"host": "localhost"}).status_code == 204
    assert shared.client.options("/api/chat", headers={"host": "127.0.0.1"}).status_code == 405


def test_any_host_name_goes_when_listening_to_the_world(tmp_path: Path) -> None:
    live = Live(tmp_path, host=Address(host="0.0.0.0"))
    with live.running():
        assert live.client.get("/", headers={"host": "example.com"}).status_code == 200


@pytest.mark.parametrize(
    ("host", "name"), [("a:1", "a"), ("a", "a"), ("[::1]:80", "::1"), ("[::1]", "::1"), ("::1", "::1"), ("", ""), (":80", "")]
)
def test_without_port(host: str, name: str) -> None:
    assert without_port(host) == name


def test_routes_that_do_not_exist(shared: Live) -> None:
    unknown = shared.client.get("/api/nope")
    assert (unknown.status_code, unknown.text) == (404, "404 page not found")
    assert unknown.headers["content-type"].startswith("text/plain")
    wrong = shared.client.get("/api/chat")
    assert (wrong.status_code, wrong.text) == (405, "405 method not allowed")


def test_liveness_and_version(shared: Live) -> None:
    from puna import __version__

    assert shared.client.get("/").text == "Ollama is running"
    assert shared.client.head("/").status_code == 200
    assert shared.client.get("/api/version").json() == {"version": __version__}
    assert shared.client.head("/api/version").status_code == 200


def test_a_page_from_elsewhere_reaches_nothing(tmp_path: Path) -> None:
    """Browsers send some POSTs without asking first: as forms do, with a plain content type. Nothing may come of them."""
    live = Live(tmp_path)
    script = live.add("hello")
    simple = {"content-type": "text/plain"}
    body = '{"model": "hello", "prompt": "Hi", "stream": false}'
    rebound = f"evil.example:{live.port}"
    with live.running():
        for headers in (
            {"origin": "http://evil.example", **simple},
            {"origin": "https://evil.example", "host": "localhost", **simple},
            {"origin": "null", **simple},  # a page in a sandboxed frame
            {"origin": "http://localhost.evil.example", **simple},
            {"origin": "http://evil.example?http://localhost", **simple},
            {"host": rebound, **simple},  # a name that points here by now, asked without an origin
            {"host": rebound, "origin": f"http://{rebound}", **simple},  # and as a page of that name asks
        ):
            refused = live.client.post("/api/generate", content=body, headers=headers)
            assert (refused.status_code, refused.content) == (403, b""), headers
            preflight = live.client.options("/api/generate", headers={**headers, "access-control-request-method": "POST"})
            assert preflight.status_code == 403
            assert not any(name.startswith("access-control") for name in preflight.headers)
            deleted = live.client.request("DELETE", "/api/delete", content='{"model": "hello"}', headers=headers)
            assert deleted.status_code == 403
        assert live.events(script) == [], "no runner was even started"
        assert [model.name for model in live.store.list()] == ["hello:latest"]


def test_a_page_that_is_allowed_reaches_all(tmp_path: Path) -> None:
    live = Live(tmp_path, origins=("https://*.example.org", "chrome-extension://*"))
    live.add("hello")
    with live.running():
        for origin in ("https://app.example.org", "chrome-extension://abc", "http://127.0.0.1:5173"):
            reply = live.post("/api/chat", {"model": "hello", "messages": [], "stream": False}, headers={"origin": origin})
            assert reply.status_code == 200
            assert reply.headers["access-control-allow-origin"] == origin
        assert live.post("/api/chat", {}, headers={"origin": "https://example.org"}).status_code == 403
