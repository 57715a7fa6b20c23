from __future__ import annotations

import io
import logging
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from puna.api.client import Client
from puna.errors import PunaError
from puna.server.access import check_exposure
from puna.server.request_id import InLog
from puna.settings import Address, Settings, load
from tests.unit.server.live import Live
from tests.unit.server.test_native import HI, last_completion, wait_until


def test_the_keys_setting() -> None:
    settings = load({"PUNA_API_KEYS": " one, two ,,", "PUNA_ALLOW_NO_KEYS": "1"})
    assert settings.api_keys == ("one", "two")
    assert settings.allow_no_keys is True


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "example.com"])
def test_other_machines_need_a_key(host: str) -> None:
    with pytest.raises(PunaError, match=r"PUNA_API_KEYS.*PUNA_ALLOW_NO_KEYS=1"):
        check_exposure(Settings(host=Address(host=host)))
    check_exposure(Settings(host=Address(host=host), api_keys=("k",)))
    check_exposure(Settings(host=Address(host=host), allow_no_keys=True))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_this_machine_needs_none(host: str) -> None:
    check_exposure(Settings(host=Address(host=host)))


def test_the_server_says_how_it_can_be_started(tmp_path: Path) -> None:
    environ = {"OLLAMA_HOST": "0.0.0.0:0", "OLLAMA_MODELS": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-m", "puna", "serve"], env=environ, capture_output=True, text=True, timeout=30)
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
    logger = logging.getLogger("puna.server.request_id")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        shared.post("/api/chat", {"model": "nope", "messages": HI}, headers={"X-Request-Id": "abc"})
        wait_until(lambda: "[abc] POST /api/chat 404 in " in text.getvalue(), timeout_s=5)  # written after the answer
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
