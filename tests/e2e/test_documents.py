"""Whatever a document tells its readers to enter works as it stands there.

Each document's blocks are run in their order, in one folder and against one server. Models of the names that the documents
use are tiny ones, but for the starter, which is the real one and made to answer shortly. ``puna serve`` and ``make`` are replaced
by what ends: the server is stopped once it listens, and make says what it would do.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from puna.settings import Settings
from puna.store.recipe import Recipe
from puna.store.store import Store
from tests.conftest import STARTER
from tests.documents import ROOT, RUN, blocks, commands
from tests.e2e.test_first_light import serving
from tests.minilm import unpack_checkpoint
from tests.patience import PATIENCE_S
from tests.tiny import RANK, write_bert, write_llama

pytestmark = pytest.mark.thorough

# Long enough for the slowest: an answer of a hundred tokens on a busy machine.
TIMEOUT_S = 10 * PATIENCE_S
DEFAULT_PORT = str(Settings().host.port)

TOOLS_TEMPLATE = (
    "{%- if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# In place of the command: a server would not end by itself.
PUNA = f"""#!{sys.executable}
import os, re, signal, subprocess, sys, urllib.request
command = [{sys.executable!r}, "-m", "puna", *sys.argv[1:]]
if sys.argv[1:2] != ["serve"]:
    os.execv(command[0], command)
given = os.environ["OLLAMA_HOST"]
host = "127.0.0.1" if given == os.environ["DOCUMENTS_SERVER"] else given.partition(":")[0]
process = subprocess.Popen(command, env={{**os.environ, "OLLAMA_HOST": host + ":0"}}, stderr=subprocess.PIPE, text=True)
with process.stderr:
    log = iter(process.stderr.readline, "")
    port = next((found[1] for line in log if (found := re.search(r"Listening on .*:([0-9]+)", line))), None)
    if port is not None:
        assert urllib.request.urlopen(f"http://127.0.0.1:{{port}}/", timeout={PATIENCE_S}).read() == b"Ollama is running"
        process.send_signal(signal.SIGTERM)
    rest = process.stderr.read()
sys.exit(process.wait() and rest)
"""
MAKE = """#!/bin/sh
exec {make} --silent --dry-run --directory {root} "$@" >/dev/null
"""


def _documents() -> list[str]:
    return sorted({block.document for block in commands() if not block.not_run})


@pytest.fixture(scope="module")
def server(starter_store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("documents")
    shutil.copytree(starter_store.root, folder / "models", copy_function=os.link)
    store = Store(folder / "models")
    source = store.pull(STARTER).config.source
    recipe = Recipe(base=STARTER, parameters={"temperature": 0, "num_predict": 40}, source=source)
    store.create(STARTER, recipe)
    reranker = store.blobs.import_file(write_bert(folder / "reranker.gguf", seed=3, n_ctx=64, pooling=RANK))
    store.create("my-reranker", Recipe(files={"reranker.gguf": reranker.digest}))
    store.close()
    with serving(folder) as running:
        yield running.url


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the files that documents speak of, as a reader would have them."""
    folder = tmp_path / "place"
    folder.mkdir()
    chat: Mapping[str, Any] = {"n_layers": 1, "n_embd": 64, "n_ff": 64}
    write_llama(folder / "model.gguf", **chat)
    write_llama(folder / "Qwen3-4B-Q4_K_M.gguf", chat_template=TOOLS_TEMPLATE, **chat)
    write_bert(folder / "reranker.gguf", seed=3, n_ctx=64, pooling=RANK)
    write_bert(folder / "embedding.gguf", seed=3, n_ctx=64)
    unpack_checkpoint(folder / "all-MiniLM-L6-v2")
    (folder / "notes.txt").write_text("The whale is a mammal.\n")
    return folder


@pytest.fixture
def environ(server: str, starter_store: Store, tmp_path: Path) -> dict[str, str]:
    shutil.copytree(starter_store.root, tmp_path / "models", copy_function=os.link)
    programs = tmp_path / "bin"
    programs.mkdir()
    make = shutil.which("make")
    for name, text in {"puna": PUNA, "make": MAKE.format(make=make, root=ROOT)}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    address = server.partition("://")[2]
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))},
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "OLLAMA_HOST": address,
        "OLLAMA_MODELS": str(tmp_path / "models"),  # of servers and engines that the documents start
        "DOCUMENTS_SERVER": address,
        "PYTHONPATH": str(ROOT),  # for tools, which readers start in the checkout
    }


@pytest.mark.parametrize("document", _documents())
def test_its_commands_work(document: str, server: str, place: Path, environ: dict[str, str]) -> None:
    port = server.rpartition(":")[2]
    for block in blocks(document):
        if block.language not in RUN or block.not_run:
            continue
        text = block.text.replace(DEFAULT_PORT, port)
        shell = [
            "bash",
            "-euo",
            "pipefail",
            "-c",
            f'curl() {{ command curl --fail-with-body --silent --show-error "$@"; }}\n{text}',
        ]
        command = shell if block.language == "sh" else [sys.executable, "-c", text]
        status, said = _run(command, place, environ)
        assert status == 0, f"{document}, line {block.line}:\n{text}\n{said}"


def _run(command: list[str], place: Path, environ: dict[str, str]) -> tuple[int, str]:
    """Its status and what it said. What it left running in the background, where it failed half way, ends with it."""
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command, cwd=place, env=environ, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True
        )
        try:
            status = process.wait(TIMEOUT_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        said.seek(0)
        return status, said.read()
