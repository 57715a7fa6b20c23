"""``puna search`` against a stand-in for the hub; no server is needed, nor started."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.patience import PATIENCE_S
from tests.registries import Registry

Puna = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def hub() -> Iterator[Registry]:
    with Registry(needs_token=False).running() as running:
        running.manifests["ann/Tiny-GGUF", "latest"] = b"{}"
        yield running


@pytest.fixture
def puna(hub: Registry, environment: dict[str, str], tmp_path: Path) -> Puna:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        env = {**environment, "HF_ENDPOINT": f"http://{hub.netloc}", "OLLAMA_HOST": "127.0.0.1:1"}
        command = [sys.executable, "-m", "puna", "search", *arguments]
        return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)

    return run


def test_what_is_found_can_be_pulled(puna: Puna, hub: Registry) -> None:
    done = puna("tiny", "gguf")
    assert (done.returncode, done.stdout) == (0, "NAME    DOWNLOADS    LIKES    UPDATED\n")
    assert hub.searches[0]["search"] == "tiny gguf"
    done = puna("tiny", "--limit", "3")
    head, row = done.stdout.splitlines()
    assert head.split() == ["NAME", "DOWNLOADS", "LIKES", "UPDATED"]
    assert row.startswith("hf.co/ann/Tiny-GGUF    1.2M         3        ")


def test_as_json(puna: Puna) -> None:
    assert json.loads(puna("tiny", "--json").stdout) == {
        "models": [
            {"name": "hf.co/ann/Tiny-GGUF", "downloads": 1234567, "likes": 3, "updated_at": "2026-08-22T12:00:00.000Z"},
        ]
    }


def test_a_registry_that_lists_what_it_has(puna: Puna, hub: Registry) -> None:
    done = puna("tiny", "--registry", hub.netloc, "--insecure")
    assert done.stdout.splitlines()[1:] == [f"{hub.netloc}/ann/Tiny-GGUF"]


def test_a_place_without_a_search_is_an_error(puna: Puna) -> None:
    done = puna("llama", "--registry", "registry.ollama.ai")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: registry.ollama.ai offers no search to programs: look at https://ollama.com/search")
