"""What /api/ps says a model takes, against what its runner's process has really taken.

*Taken* is: private pages that were written to, beyond those of a runner that has opened the tensor library and measured
the model but holds nothing of it, and the pages of the model's file that are mapped and present. Both are read after the whole
context was used: a cache takes no memory before it is written to, yet it is the model's from the start, so /api/ps
counts it in full. Pages of the tensor library itself are nobody's.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest

from puna import wire
from puna.host import private_bytes
from puna.llm.runner import Runner, command_for
from puna.store.store import Store
from tests.conftest import STARTER
from tests.e2e.test_first_light import Server, serving
from tests.tiny import write_llama

MODELS = {
    "small": {"n_layers": 4, "n_embd": 512, "n_heads": 8, "n_kv_heads": 4, "n_ff": 1536, "dtype": "q8_0"},  # 14 MB
    "middle": {"n_layers": 6, "n_embd": 1024, "n_heads": 16, "n_kv_heads": 8, "n_ff": 3072, "dtype": "q4_K"},  # 41 MB
    "large": {"n_layers": 6, "n_embd": 1024, "n_heads": 16, "n_kv_heads": 8, "n_ff": 3072, "dtype": "f16"},  # 146 MB
}


def limited(store: Store, folder: Path, **environ: str) -> AbstractContextManager[Server]:
    """A server with one model at a time, for one request at a time."""
    limits = {"OLLAMA_NUM_PARALLEL": "1", "OLLAMA_MAX_LOADED_MODELS": "1"}
    return serving(folder, OLLAMA_MODELS=str(store.blobs.folder.parent), **limits, **environ)


@pytest.fixture(scope="module")
def server(starter_store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with limited(starter_store, tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="module")
def libllamas(starter_store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Where libllama runs all models."""
    with limited(starter_store, tmp_path_factory.mktemp("libllamas"), OLLAMA_NEW_ENGINE="0") as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def path_of(name: str, folder: Path, store: Store) -> Path:
    if name == STARTER:
        path = store.get(STARTER).model_path
        assert path is not None
        return path
    path = folder / f"{name}.gguf"
    return path if path.exists() else write_llama(path, n_ctx=4096, **MODELS[name])  # type: ignore[arg-type]


def mapped_bytes(pid: int, path: Path) -> int:
    """Of the file, present."""
    found, is_the_file = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_the_file = line.endswith(str(path))
        elif is_the_file and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


def without_vocabulary(path: Path, folder: Path) -> Path:
    """The same file, of a way to cut texts that nobody knows. A vocabulary is the model's, and is read while it is measured."""
    found = folder / f"{path.name} without vocabulary"
    if not found.exists():
        key, content = b"tokenizer.ggml.pre", bytearray(path.read_bytes())
        content[content.index(key) + len(key) + 4 + 8] = ord("?")  # behind the value's type and length
        found.write_bytes(content)
    return found


@functools.cache
def baseline(path: Path) -> int:
    """What a runner has written to that has measured the model and holds nothing of it, whatever is asked of the model."""
    return asyncio.run(_measured(path))


async def _measured(path: Path) -> int:
    runner = await Runner.start(command_for(path))
    try:
        await runner.try_load(wire.LoadRequest(operation="fit"), 60)
        return private_bytes(runner.pid)
    finally:
        await runner.close()


MORE = [("small", 2048, True), ("middle", 512, True), *(("large", n_ctx, True) for n_ctx in (512, 2048))]
MORE += [(STARTER, 2048, True), (STARTER, 512, False)]


@pytest.mark.parametrize(
    ("name", "n_ctx", "use_mmap"),
    [
        ("small", 512, True),
        ("middle", 2048, True),
        ("large", 512, False),
        ("large", 512, None),
        (STARTER, 512, True),
        (STARTER, 2048, None),
        *(pytest.param(*case, marks=pytest.mark.thorough) for case in MORE),
    ],
)
def test_ps_tells_what_was_taken(
    server: Server, starter_store: Store, folder: Path, name: str, n_ctx: int, use_mmap: bool | None
) -> None:
    path = path_of(name, folder, starter_store)
    check(server, folder, path, name if name == STARTER else str(path), n_ctx, use_mmap)


@pytest.mark.parametrize("use_mmap", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_ps_tells_what_libllama_has_taken(
    libllamas: Server, folder: Path, starter_store: Store, name: str, use_mmap: bool
) -> None:
    """Also where it multiplies weights in an order of its own, so that they are copies. What it keeps of its look at the
    file, some megabytes of the heap that the load uses again, is the model's too: the baseline has not had it.
    """
    path = path_of(name, folder, starter_store)
    check(libllamas, folder, path, str(path), 512, use_mmap)


def check(server: Server, folder: Path, path: Path, model: str, n_ctx: int, use_mmap: bool | None) -> None:
    tokens = [i * 7 % 300 for i in range(n_ctx - 40)]
    options = {"num_ctx": n_ctx, "num_predict": 4, "temperature": 0, "use_mmap": use_mmap}
    body = {"model": model, "context": tokens, "prompt": "hello", "options": options, "stream": False}
    response = server.client.post("/api/generate", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["prompt_eval_count"] >= len(tokens)
    runner = max((process for process in server.runners()), key=_resident)
    taken = private_bytes(runner.pid) - baseline(without_vocabulary(path, folder)) + mapped_bytes(runner.pid, path)
    [shown] = server.client.get("/api/ps").json()["models"]
    assert shown["size_vram"] == 0
    # Within 5 %; of a small model within what the heap keeps or gives back from one run to the next.
    assert abs(shown["size"] - taken) < max(0.05 * taken, 2e6), (shown["size"] / 1e6, taken / 1e6)


def _resident(process: psutil.Process) -> int:
    return int(process.memory_info().rss)


def test_a_model_that_needs_more_than_there_is_fails_with_the_numbers(server: Server, folder: Path) -> None:
    """Before anything of it was taken, and the server and the model that is loaded go on."""
    path = write_llama(folder / "endless.gguf", n_layers=8, n_embd=1024, n_heads=16, n_kv_heads=16, n_ff=32, n_ctx=1 << 24)
    body = {"model": str(path), "prompt": "hello", "options": {"num_ctx": 1 << 24}, "stream": False}
    response = server.client.post("/api/generate", json=body)
    assert response.status_code == 500
    assert re.search(r"model requires more system memory \([\d.]+ GiB\) than is available \([\d.]+ GiB\)", response.text)
    assert server.chat(STARTER, "Hello")["message"]["content"]
