"""The official npm client against a server process with real runners.

Node comes from a Python package, the client from the npm registry: the version and digest of ``npm/package-lock.json``,
kept per machine in the user's cache folder. Without a reachable registry the test fails the first time: it must not pass
by not running.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from puna.store.recipe import Recipe
from puna.store.store import Store
from puna.web import libraries
from tests.e2e.test_first_light import serving
from tests.patience import PATIENCE_S
from tests.tiny import write_bert, write_llama

HERE = Path(__file__).parent / "npm"
BIN = Path(sys.executable).parent
FILES = ("package.json", "package-lock.json")
TIMEOUT_S = 300


@pytest.fixture(scope="module")
def client() -> Path:
    """The client's module, installed once per machine and lock file."""
    digest = hashlib.sha256(b"".join((HERE / name).read_bytes() for name in FILES)).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "puna" / "test-npm" / digest
    if not (folder / "installed").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in FILES:
            shutil.copy(HERE / name, folder)
        command = [str(BIN / "npm"), "ci", *libraries.OPTIONS]
        limit_s = libraries.TIMEOUT_S
        done = subprocess.run(command, cwd=folder, env=with_node(), capture_output=True, text=True, timeout=limit_s)
        assert done.returncode == 0, done.stderr
        (folder / "installed").touch()
    return folder / "node_modules" / "ollama" / "dist" / "index.mjs"


def with_node() -> dict[str, str]:
    return {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"}


def test_the_npm_client(client: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "models")
    files = {
        "tiny": write_llama(tmp_path / "tiny.gguf", n_layers=1, n_embd=64, n_ff=64),
        "embedder": write_bert(tmp_path / "bert.gguf", n_layers=1, n_embd=64, n_ff=64),
    }
    for name, file in files.items():
        store.create(name, Recipe(files={"model.gguf": store.blobs.import_file(file).digest}))
    with serving(tmp_path) as server:
        command = [str(BIN / "node"), str(HERE / "client.mjs"), server.url, "tiny", str(client), "embedder"]
        done = subprocess.run(command, env=with_node(), capture_output=True, text=True, timeout=TIMEOUT_S)
        assert done.returncode == 0, done.stderr
        _wait_until_idle(server.client)
    found = json.loads(done.stdout)
    assert found["chat"] == {"text": found["streamed"], "role": "assistant", "done": True, "count": 12}
    assert found["chat"]["text"]
    assert found["last"] is True
    assert found["generate"]["reason"] == "length"
    assert found["generate"]["context"] > 12
    assert found["structured"]["n"] in (1, 2)
    assert set(found["models"]) == set(found["deleted"]) == {"tiny:latest", "embedder:latest"}
    assert "copied:latest" in found["copied"]
    assert found["running"] == ["tiny:latest"]
    assert found["show"]["family"] == "llama"
    assert "completion" in found["show"]["capabilities"]
    assert found["embed"] == {"n": 2, "width": 64}
    assert found["missing"]["status"] == 404
    assert "not found" in found["missing"]["text"]
    assert found["wrong"] == {"status": 400, "text": "invalid JSON schema in format: Invalid type: dog"}
    assert found["aborted"] is True
    assert found["abort"] == "AbortError"


def _wait_until_idle(server: httpx.Client) -> None:
    """What the client aborted is not computed to its end."""
    deadline = time.monotonic() + PATIENCE_S
    while 'puna_requests_running{model="tiny:latest"} 0.0' not in (text := server.get("/metrics").text):
        assert time.monotonic() < deadline, text
        time.sleep(0.05)
