"""The page over a real model and a real engine, and the pictures of it that the documents show.

``make screens`` has them written into the documents' folder; else they are made as well, and thrown away.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from puna.store.recipe import Recipe
from puna.store.store import Store
from tests.conftest import STARTER
from tests.documents import ROOT
from tests.e2e.test_first_light import Server, serving
from tests.e2e.test_web import answers, ask, browser, choose, message, opened, send
from tests.patience import PATIENCE_S, wait_until

__all__ = ["browser"]  # the fixture
pytestmark = pytest.mark.thorough

SCREENS = ROOT / "docs" / "guides" / "screens"
MAX_BYTES = 150_000
SYSTEM = "You are a patient teacher of the natural sciences. You answer in clear, short paragraphs and name one example. " * 3
QUESTIONS = ["How do birds fly?", "What is a prime number?", "Why do leaves turn red?", "How does a magnet work?"]
PROMPT = "Write a short Python function that says whether a number is even, and explain it."


@pytest.fixture(scope="module")
def server(starter_store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    parameters = {"temperature": 0.0, "num_predict": 120, "num_ctx": 2048, "seed": 1}
    folder = tmp_path_factory.mktemp("server")
    shutil.copytree(starter_store.root, folder / "models", copy_function=os.link)  # others want the model as it was
    store = Store(folder / "models")
    store.create(STARTER, Recipe(base=STARTER, parameters=parameters, source=store.get(STARTER).config.source))
    store.close()
    with serving(folder, OLLAMA_NUM_PARALLEL="4") as running:
        yield running


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Page]:
    with opened(browser, server.url) as found:
        yield found.page


def screen(page: Page, name: str, tmp_path: Path) -> None:
    """Into the documents if that is what the tests were started for; small enough for them in any case."""
    folder = Path(os.environ.get("PUNA_SCREENS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    page.mouse.move(0, 0)
    page.evaluate("document.activeElement?.blur()")
    page.screenshot(path=folder / f"{name}.png", animations="disabled")
    assert (folder / f"{name}.png").stat().st_size < MAX_BYTES


@contextmanager
def busy(server: Server) -> Iterator[None]:
    """Several conversations with one beginning, which go on until the block ends."""
    is_over = threading.Event()

    def talk(question: str) -> None:
        with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
            body = {"model": STARTER, "messages": messages, "options": {"num_predict": 1200, "ignore_eos": True}}
            while not is_over.is_set():
                with client.stream("POST", "/api/chat", json=body) as response:
                    for _ in response.iter_lines():
                        if is_over.is_set():
                            break

    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        talks = [pool.submit(talk, question) for question in QUESTIONS]
        try:
            yield
        finally:
            is_over.set()
    for done in talks:
        done.result()


def test_a_real_model_answers(page: Page, server: Server, tmp_path: Path) -> None:
    answer = ask(page, STARTER, "What is the capital of France? Answer in one short sentence.")
    expect(answer.locator(".prose")).to_contain_text("Paris")
    expect(answer.locator(".meta")).to_have_text(re.compile(r"^\d+ tokens · [\d.]+ per second"))
    again = ask(page, STARTER, PROMPT, 2)
    expect(again.locator(".meta")).to_contain_text("prompt tokens reused")
    screen(page, "chat", tmp_path)
    page.emulate_media(color_scheme="dark")
    screen(page, "dark", tmp_path)
    page.get_by_role("link", name="Models").click()
    page.emulate_media(color_scheme="light")
    expect(page.get_by_role("heading", name=STARTER)).to_be_visible()
    screen(page, "models", tmp_path)


def test_the_engine_at_work_is_seen(page: Page, server: Server, tmp_path: Path) -> None:
    with busy(server):
        page.goto("/#/engine")
        card = page.get_by_role("article", name=STARTER)
        expect(card.get_by_text(re.compile(r"^Sequences \([4-9]\)$"))).to_be_visible()
        expect(card.get_by_text("4 running", exact=False).first).to_be_visible()
        expect(card.get_by_role("img", name=re.compile(r"read, \d+ written")).nth(3)).to_be_visible()
        expect(card.get_by_role("img", name=re.compile(r"prefixes, of which [1-9]"))).to_be_visible()
        expect(card.locator(".gauges dd").first).to_have_text(re.compile(r"^[1-9][\d.k]* per second"))
        expect(card.locator(".trace").first).to_have_attribute("points", re.compile("( .*){8}"))
        screen(page, "engine", tmp_path)
    wait_until(lambda: all(held["state"] == "idle" for held in _sequences(server)))
    picture = server.client.get("/api/engine").json()
    [model] = picture["models"]
    assert sum(held["tokens"] for held in _sequences(server)) >= model["health"]["cache_used"] > 0
    assert model["occupancy"]["computed"] > 400
    shared = [node for node in model["occupancy"]["prefixes"] if node["sequences"] >= len(QUESTIONS)]
    assert shared, "all conversations begin alike"
    assert SYSTEM[:20] not in json.dumps(picture)


def _sequences(server: Server) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.client.get("/api/engine").json()["models"][0]["occupancy"]["sequences"]
    return found


def test_a_phone_shows_it_too(browser: Browser, server: Server, tmp_path: Path) -> None:
    with opened(browser, server.url, viewport={"width": 390, "height": 720}, has_touch=True, is_mobile=True) as found:
        choose(found.page, STARTER)
        expect(message(found.page)).to_be_visible()
        send(found.page, "What is the capital of France? Answer in one short sentence.")
        expect(answers(found.page).locator(".actions")).to_be_visible()
        screen(found.page, "phone", tmp_path)


def test_the_documents_show_screens_that_are_there_and_no_others() -> None:
    text = (ROOT / "docs" / "guides" / "web.md").read_text()
    shown = set(re.findall(r"\]\(screens/([\w.]+)\)", text))
    assert shown == {path.name for path in SCREENS.iterdir()} != set()
    assert all((SCREENS / name).stat().st_size < MAX_BYTES for name in shown)
