"""Programs that speak to Ollama, OpenAI or Anthropic speak to Puna unchanged: LangChain, LlamaIndex, LiteLLM, llm.

They are installed as their users install them, into an environment of their own, once per machine and list of versions.
Without a reachable package index the first time fails: it must not pass by not running.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from puna.store.recipe import Recipe
from puna.store.store import Store
from tests.e2e.test_first_light import Server, serving
from tests.patience import PATIENCE_S
from tests.tiny import write_bert, write_llama

pytestmark = pytest.mark.thorough

HERE = Path(__file__).parent / "programs"
INSTALL_TIMEOUT_S = 900


@pytest.fixture(scope="module")
def programs() -> Path:
    """The folder of their commands."""
    digest = hashlib.sha256((HERE / "requirements.txt").read_bytes() + sys.version.encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "puna" / "test-programs" / digest
    if not (folder / "installed").exists():
        shutil.rmtree(folder, ignore_errors=True)
        for command in (
            [sys.executable, "-m", "venv", str(folder)],
            [str(folder / "bin" / "pip"), "install", "--quiet", "--requirement", str(HERE / "requirements.txt")],
        ):
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
            assert done.returncode == 0, done.stderr
        (folder / "installed").touch()
    return folder / "bin"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("programs")
    store = Store(folder / "models")
    files = {
        "tiny": write_llama(folder / "tiny.gguf", seed=5, n_layers=1, n_embd=64, n_ff=64, n_ctx=512),
        "embedder": write_bert(folder / "bert.gguf", n_layers=1, n_embd=64, n_ff=64),
    }
    for name, file in files.items():
        store.create(name, Recipe(files={"model.gguf": store.blobs.import_file(file).digest}))
    store.close()
    with serving(folder) as running:
        yield running


def run(command: list[str], home: Path, given: dict[str, str] | None = None) -> str:
    """What it prints. It gets a home of its own, and nothing of the tests' packages."""
    env = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "SSL_CERT_FILE", "TMPDIR")}
    env |= {"HOME": str(home), "NO_PROXY": "127.0.0.1,localhost"} | (given or {})
    done = subprocess.run(command, env=env, cwd=home, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def script(programs: Path, name: str, server: Server, home: Path) -> Any:
    printed = run([str(programs / "python"), str(HERE / name), server.url, "tiny", "embedder"], home)
    return json.loads(printed.strip().splitlines()[-1])


def assert_vectors(vectors: list[list[float]]) -> None:
    assert [len(vector) for vector in vectors] == [64, 64]
    assert vectors[0] != vectors[1]


def test_langchain(programs: Path, server: Server, tmp_path: Path) -> None:
    found = script(programs, "langchain_chat.py", server, tmp_path)
    for api in ("ollama", "openai"):
        assert found[api]["text"] == found[api]["streamed"] != ""
        assert (found[api]["tokens"], found[api]["prompt"] > 2) == (12, True)
    assert found["ollama"]["text"] == found["openai"]["text"]
    for name in ("structured", "structured_openai"):
        assert set(found[name]) == {"name", "is_dark"}
    assert_vectors(found["vectors"])
    assert found["vectors_openai"] == [pytest.approx(vector, abs=1e-6) for vector in found["vectors"]]


def test_llama_index(programs: Path, server: Server, tmp_path: Path) -> None:
    found = script(programs, "llama_index_chat.py", server, tmp_path)
    assert found["text"] == found["streamed"] != ""
    assert found["completed"]
    assert_vectors(found["vectors"])


def test_litellm(programs: Path, server: Server, tmp_path: Path) -> None:
    found = script(programs, "litellm_chat.py", server, tmp_path)
    for api in ("ollama", "openai", "anthropic"):
        assert found[api]["text"] == found[api]["streamed"] != ""
        assert found[api]["tokens"] == 12
    assert_vectors(found["vectors"])


def test_the_llm_tool(programs: Path, server: Server, tmp_path: Path) -> None:
    """With its plugin for Ollama, and with a model of OpenAI's API that its own file of models names."""
    llm = str(programs / "llm")
    given = {"OLLAMA_HOST": server.url, "LLM_USER_PATH": str(tmp_path / "llm")}
    assert "tiny" in run([llm, "ollama", "models"], tmp_path, given)
    options = ["-o", "num_predict", "12", "-o", "temperature", "0"]
    streamed = run([llm, "-m", "tiny:latest", *options, "hello fox"], tmp_path, given)
    whole = run([llm, "-m", "tiny:latest", "--no-stream", *options, "hello fox"], tmp_path, given)
    assert streamed.strip() == whole.strip() != ""
    models = tmp_path / "llm" / "extra-openai-models.yaml"
    models.write_text(f"- model_id: mine\n  model_name: tiny\n  api_base: {server.url}/v1\n")
    answer = run([llm, "-m", "mine", "-o", "max_tokens", "12", "-o", "temperature", "0", "hello fox"], tmp_path, given)
    assert answer.strip() == whole.strip()
