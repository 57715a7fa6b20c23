"""The page: who gets it, with which headers, and that nothing but its files can be had."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from puna.web import files
from puna.web.libraries import TAKEN
from tests.unit.server.live import Live

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


@pytest.mark.parametrize("accept", ["*/*", "", "application/json", "text/plain, */*"])
def test_programs_get_the_text_they_look_for(shared: Live, accept: str) -> None:
    response = shared.client.get("/", headers={"accept": accept})
    assert (response.status_code, response.text) == (200, "Ollama is running")
    assert response.headers["content-type"] == "text/plain; charset=utf-8"
    assert response.headers["vary"] == "Accept"


def test_browsers_get_the_page(shared: Live) -> None:
    response = shared.client.get("/", headers=BROWSER)
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["vary"] == "Accept"
    assert "<title>Puna</title>" in response.text
    assert "Ollama is running" not in response.text
    head = shared.client.head("/", headers=BROWSER)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == "text/html; charset=utf-8"


def test_it_may_load_nothing_from_elsewhere_and_be_framed_by_nobody(shared: Live) -> None:
    headers = shared.client.get("/", headers=BROWSER).headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-frame-options"] == "DENY"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


def test_no_script_or_style_stands_in_the_page_itself() -> None:
    text = (files.PAGE / files.INDEX).read_text()
    assert not re.search(r"<script(?![^>]*\ssrc=)", text)
    assert not re.search(r"<style|\sstyle=|\son\w+=|https?://(?!www\.w3\.org)", text)


def test_all_it_names_is_there(shared: Live) -> None:
    text = shared.client.get("/", headers=BROWSER).text
    named = re.findall(r'(?:href|src)="(web/[^"]+)"', text)
    assert named
    for path in named:
        response = shared.client.get(f"/{path}")
        assert response.status_code == 200, path
        assert response.headers["content-type"] in files.TYPES.values()
        assert response.headers["content-security-policy"]


def test_every_module_is_announced_so_that_none_waits_for_another() -> None:
    text = (files.PAGE / files.INDEX).read_text()
    announced = set(re.findall(r'rel="modulepreload" href="web/(app/[\w.]+)"', text))
    assert announced | {"app/main.js"} == {path for path in files.read() if path.startswith("app/")}


def test_its_modules_import_one_another_by_paths_that_exist() -> None:
    for path in (files.PAGE / "app").glob("*.js"):
        for name in re.findall(r"""(?:from|import)\s*\(?["']([^"']+)["']""", path.read_text()):
            is_library = name.startswith("../libraries/")
            assert is_library or (path.parent / name).is_file(), f"{path.name}: {name}"
            assert not is_library or name.removeprefix("../libraries/") in TAKEN, f"{path.name}: {name}"


def test_what_a_browser_has_it_is_not_sent_again(shared: Live) -> None:
    first = shared.client.get("/web/app/main.js")
    again = shared.client.get("/web/app/main.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize(
    "path", ["/web/", "/web/app", "/web/app/none.js", "/web/..%2f..%2f/x", "/web/app/..%2fmain.js", "/web/page/index.html"]
)
def test_nothing_else_can_be_had(shared: Live, path: str) -> None:
    assert shared.client.get(path).status_code == 404


def test_it_is_there_without_a_key_and_the_rest_is_not(tmp_path: Path) -> None:
    with Live(tmp_path, api_keys=("secret",)).running() as live:
        assert "<title>Puna</title>" in live.client.get("/", headers=BROWSER).text
        assert live.client.get("/web/app/main.js").status_code == 200
        assert live.client.get("/api/tags").status_code == 401
        assert live.client.get("/api/engine").status_code == 401
