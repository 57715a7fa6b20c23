from __future__ import annotations

import io
import logging
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from puna.api.client import Client
from puna.errors import PunaError
from puna.server.http.access import Key, KeyScope, check_exposure, read_keys
from puna.server.http.request_id import InLog
from puna.settings import Address, Settings, load
from tests.patience import PATIENCE_S, wait_until
from tests.unit.server.apis.test_native import HI, last_completion
from tests.unit.server.live import Live


def test_the_keys_setting() -> None:
    settings = load({"PUNA_API_KEYS": " one, two ,,", "PUNA_ALLOW_NO_KEYS": "1"})
    assert settings.api_keys == ("one", "two")
    assert settings.allow_no_keys is True


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "example.com"])
def test_other_machines_need_a_key(host: str) -> None:
    with pytest.raises(PunaError, match=r"PUNA_API_KEYS.*PUNA_API_KEYS_FILE.*PUNA_ALLOW_NO_KEYS=1"):
        check_exposure(Settings(host=Address(host=host)))
    check_exposure(Settings(host=Address(host=host), api_keys=("k",)))
    check_exposure(Settings(host=Address(host=host), allow_no_keys=True))


def keys_in(folder: Path, text: str, *listed: str) -> list[Key]:
    path = folder / "keys"
    path.write_text(text)
    path.chmod(0o600)
    return read_keys(Settings(api_keys=listed, api_keys_file=path))


def test_keys_come_from_a_file_too(tmp_path: Path) -> None:
    every = frozenset(KeyScope)
    found = keys_in(tmp_path, "# who may\nfile-key\n\n  other inference  # a friend\n", "env-key", "app management")
    assert found == [
        Key(b"env-key", every),
        Key(b"app", frozenset({KeyScope.MANAGEMENT})),
        Key(b"file-key", every),
        Key(b"other", frozenset({KeyScope.INFERENCE})),
    ]
    check_exposure(Settings(host=Address(host="0.0.0.0"), api_keys_file=tmp_path / "keys"))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "there is no key in it"),
        ("# all gone\n", "there is no key in it"),
        ("key everything\n", "a key has a scope that does not exist; there are inference and management"),
    ],
)
def test_a_file_of_keys_that_cannot_be_meant_stops_the_server(tmp_path: Path, text: str, error: str) -> None:
    """An empty file must not open the server, and no message shows a key."""
    with pytest.raises(PunaError, match=error) as caught:
        keys_in(tmp_path, text)
    assert "key everything" not in str(caught.value)


def test_a_file_of_keys_must_be_there_and_be_text(tmp_path: Path) -> None:
    with pytest.raises(PunaError, match="No such file"):
        read_keys(Settings(api_keys_file=tmp_path / "missing"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(PunaError, match="PUNA_API_KEYS_FILE="):
        read_keys(Settings(api_keys_file=tmp_path / "binary"))


def test_who_else_can_read_the_keys_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys_in(tmp_path, "key\n")
    assert not caplog.records
    (tmp_path / "keys").chmod(0o644)
    read_keys(Settings(api_keys_file=tmp_path / "keys"))
    assert "can be read by other users" in caplog.text


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_this_machine_needs_none(host: str) -> None:
    check_exposure(Settings(host=Address(host=host)))


def test_the_server_says_how_it_can_be_started(tmp_path: Path) -> None:
    environ = {"OLLAMA_HOST": "0.0.0.0:0", "OLLAMA_MODELS": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "puna", "serve"], env=environ, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 1
    assert "Set PUNA_API_KEYS" in done.stderr
    assert "Traceback" not in done.stderr


def test_keys_are_asked_for_everywhere(tmp_path: Path) -> None:
    live = Live(tmp_path, api_keys=("first", "second"))
    live.add("hello")
    with live.running():
        assert live.client.get("/").text == "Ollama is running"
        assert live.client.get("/health").json() == {"status": "ok"}
        for method, path in [
            ("GET", "/api/version"),
            ("GET", "/api/tags"),
            ("POST", "/api/chat"),
            ("DELETE", "/api/delete"),
            ("POST", "/v1/chat/completions"),
            ("GET", "/v1/models"),
            ("POST", "/v1/messages"),
            ("GET", "/metrics"),
            ("GET", "/nowhere"),
            ("GET", "//api/tags"),
        ]:
            for headers in ({}, {"authorization": "Bearer third"}, {"x-api-key": "firs"}):
                response = live.client.request(method, live.url + path, headers=headers)
                assert response.status_code == 401, (method, path, headers)
                assert response.headers["www-authenticate"] == "Bearer"
                assert response.headers["x-request-id"]
        error = live.post("/v1/messages", {}).json()
        assert error["error"]["type"] == "authentication_error"
        assert live.post("/api/chat", {}).json()["error"].startswith("unauthorized")
        for good in ({"authorization": "Bearer second"}, {"authorization": "bearer first"}, {"x-api-key": "first"}):
            assert live.client.get("/api/tags", headers=good).status_code == 200
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="second", max_retries=0) as client:
            reply = client.chat.completions.create(model="hello", messages=[{"role": "user", "content": "Hi"}])
            assert reply.choices[0].message.content == "Hello world"


def test_a_key_is_good_for_its_scopes(tmp_path: Path) -> None:
    live = Live(tmp_path, api_keys=("asks inference", "keeps management", "both inference management", "all"))
    live.add("hello")
    allowed = {"asks": (True, False), "keeps": (False, True), "both": (True, True), "all": (True, True)}
    chat: dict[str, Any] = {"model": "hello", "messages": HI, "stream": False}
    inference = [("/api/chat", chat), ("/v1/chat/completions", chat), ("/api/show", {"model": "hello"})]
    with live.running():
        for key, (may_ask, may_keep) in allowed.items():
            headers = {"authorization": f"Bearer {key}"}
            for path in ("/api/tags", "/api/ps", "/v1/models", "/metrics"):
                assert live.client.get(path, headers=headers).status_code == 200
            for path, body in inference:
                assert live.post(path, body, headers=headers).status_code == (200 if may_ask else 403), (key, path)
            copied = live.post("/api/copy", {"source": "hello", "destination": key}, headers=headers)
            deleted = live.client.request("DELETE", "/api/delete", json={"model": key}, headers=headers)
            assert copied.status_code == deleted.status_code == (200 if may_keep else 403), key
            for path in ("/api/pull", "/api/create", "/api/push", "/api/blobs/sha256:00"):
                response = live.post(path, {}, headers=headers)
                assert (response.status_code == 403) != may_keep, (key, path)
        refused = live.post("/api/copy", {}, headers={"authorization": "Bearer asks"})
        assert refused.json() == {"error": "forbidden: this API key is not good for management"}
        openais = live.post("/v1/completions", {}, headers={"authorization": "Bearer keeps"}).json()["error"]
        assert (openais["type"], openais["message"]) == ("permission_error", "forbidden: this API key is not good for inference")


def test_a_page_may_ask_before_it_has_shown_a_key(tmp_path: Path) -> None:
    live = Live(tmp_path, api_keys=("first",))
    with live.running():
        response = live.client.options("/api/chat", headers={"origin": "http://localhost:3000"})
        assert response.status_code == 204
        assert "Authorization" in response.headers["access-control-allow-headers"]


def test_request_ids(shared: Live) -> None:
    response = shared.post("/api/chat", {"model": "hello", "messages": HI}, headers={"X-Request-Id": "from-a-proxy.1"})
    assert response.headers["x-request-id"] == response.headers["request-id"] == "from-a-proxy.1"
    assert last_completion(shared)["request_id"] == "from-a-proxy.1"
    made = [shared.post("/api/chat", {"model": "hello", "messages": HI}).headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]
    assert all(request_id.startswith("req_") for request_id in made)
    unsound = shared.client.get("/api/version", headers={"X-Request-Id": "a b\tc"})
    assert unsound.headers["x-request-id"].startswith("req_")
    failed = shared.post("/v1/messages", {}, headers={"X-Request-Id": "mine"})
    assert failed.json()["request_id"] == "mine"


def test_request_ids_are_in_the_log(shared: Live) -> None:
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.addFilter(InLog())
    handler.setFormatter(logging.Formatter("%(request)s%(message)s"))
    logger = logging.getLogger("puna.server.http.request_id")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        shared.post("/api/chat", {"model": "nope", "messages": HI}, headers={"X-Request-Id": "abc"})
        wait_until(lambda: "[abc] POST /api/chat 404 in " in text.getvalue())  # written after the answer
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def test_our_own_client_shows_its_key(tmp_path: Path) -> None:
    live = Live(tmp_path, api_keys=("first",))
    with live.running():
        with Client(live.settings.host, "first") as client:
            assert client.tags() == {"models": []}
        with Client(live.settings.host) as client, pytest.raises(PunaError, match="unauthorized"):
            client.tags()


def test_the_command_line_knows_the_file_of_keys(tmp_path: Path) -> None:
    """A command without a running server starts one with the same settings, which asks for a key."""
    (tmp_path / "keys").write_text("# mine\nfirst-key inference management\nsecond\n")
    (tmp_path / "keys").chmod(0o600)
    environ = {"OLLAMA_MODELS": str(tmp_path), "HOME": str(tmp_path), "OLLAMA_HOST": "127.0.0.1:1"}
    environ["PUNA_API_KEYS_FILE"] = str(tmp_path / "keys")
    done = subprocess.run(
        [sys.executable, "-m", "puna", "list", "--json"], env=environ, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_only_who_manages_pins_models_or_takes_pinned_ones_away(tmp_path: Path) -> None:
    live = Live(tmp_path, api_keys=("admin", "app inference"), max_loaded_models=1)
    live.add("hello")
    live.add("other")

    def ask(key: str, path: str = "/api/chat", **body: Any) -> httpx.Response:
        body = {"model": "hello", "messages": HI, "prompt": "Hi", "stream": False, **body}
        return live.post(path, body, headers={"authorization": f"Bearer {key}"})

    def left_s() -> float:
        [model] = live.client.get("/api/ps", headers={"authorization": "Bearer app"}).json()["models"]
        return (datetime.fromisoformat(model["expires_at"]) - datetime.now(UTC)).total_seconds()

    with live.running():
        for path in ("/api/chat", "/api/generate"):
            refused = ask("app", path, keep_alive=-1)
            assert (refused.status_code, "keep_alive" in refused.json()["error"]) == (403, True)
        refused = ask("app", "/api/embed", keep_alive="-1m", input=[])
        assert refused.status_code == 403
        assert ask("app", keep_alive=600).status_code == 200
        assert 500 < left_s() < 601
        assert ask("admin", keep_alive=-1).status_code == 200
        assert left_s() > 10**8
        assert ask("app", keep_alive=1).status_code == 200
        assert left_s() > 10**8, "who may not pin may not take the pin away"
        assert ask("app", messages=[], keep_alive=0).status_code == 403
        assert ask("app", "/api/generate", prompt="", keep_alive=0).status_code == 403
        assert ask("app", model="other").status_code == 503
        assert ask("admin", messages=[], keep_alive=0).json()["done_reason"] == "unload"
        assert ask("app", model="other").status_code == 200
        assert ask("app", model="other", messages=[], keep_alive=0).json()["done_reason"] == "unload"


@pytest.mark.parametrize(
    ("keys", "isolate", "is_apart"),
    [
        (("one", "two"), None, True),
        (("one", "two"), False, False),
        (("one",), None, False),
        (("one", "one inference"), None, False),
        (("one",), True, True),
        ((), None, False),
    ],
)
def test_prompts_of_several_keys_are_kept_apart(
    tmp_path: Path, keys: tuple[str, ...], isolate: bool | None, is_apart: bool
) -> None:
    live = Live(tmp_path, api_keys=keys, isolate_keys=isolate)
    script = live.add("hello")
    texts = [key.split()[0] for key in keys] or ["anybody"]
    with live.running():
        for key in texts * 2:
            for path in ("/api/chat", "/api/generate", "/v1/chat/completions", "/v1/messages"):
                body = {"model": "hello", "messages": HI, "prompt": "Hi", "max_tokens": 5, "stream": False}
                assert live.post(path, body, headers={"authorization": f"Bearer {key}"}).status_code == 200
    salts = [request["salt"] for request in live.completions(script)]
    assert salts[: len(salts) // 2] == salts[len(salts) // 2 :], "a key's stays what it is"
    assert len(set(salts)) == len(set(texts)) if is_apart else set(salts) == {""}
    assert not [salt for salt in salts for key in texts if key in salt]
