"""A server that may open 512 files, and a thousand connections that say nothing."""

from __future__ import annotations

import json
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from bench.load import chaos

from tests.patience import PATIENCE_S
from tests.tiny import write_llama

N_SILENT = 1000
SERVE = ["sh", "-c", 'ulimit -n 512; exec "$0" -m puna serve', sys.executable]


@pytest.fixture
def many_files() -> Iterator[None]:
    """For this end of the connections."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], min(before[1], 4096)), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextmanager
def silent(url: str, count: int) -> Iterator[None]:
    place = urlsplit(url)
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(socket.create_connection((place.hostname or "", place.port or 0), timeout=PATIENCE_S))
        yield


def ask(url: str, model: Path, n_predict: int) -> dict[str, Any]:
    options = {"temperature": 0, "ignore_eos": True, "num_ctx": 512, "num_predict": n_predict}
    body = {"model": str(model), "messages": [{"role": "user", "content": "hello"}], "options": options}
    with httpx.stream("POST", f"{url}/api/chat", json=body, timeout=PATIENCE_S) as response:
        lines = [json.loads(line) for line in response.iter_lines()]
    last: dict[str, Any] = lines[-1]
    return last


@pytest.mark.usefixtures("many_files")
def test_a_chat_goes_on_beside_a_thousand_silent_connections(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "tiny.gguf", n_layers=1, n_ctx=512)
    with chaos.serving(tmp_path, SERVE, PUNA_WARM_SPARE="0") as server:
        ask(server.url, model, 1)
        ends: list[dict[str, Any]] = []
        goes_on = threading.Thread(target=lambda: ends.append(ask(server.url, model, 400)))
        goes_on.start()
        with silent(server.url, N_SILENT):
            begun_meanwhile = ask(server.url, model, 20)
            goes_on.join(PATIENCE_S)
        assert begun_meanwhile["eval_count"] == 20
        assert ends[0]["eval_count"] == 400
        assert chaos.stop(server, signal.SIGTERM) == []
