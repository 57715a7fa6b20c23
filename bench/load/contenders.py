"""The servers that a comparison starts or is given, and what their processes take.

A contender is up from start to end of the comparison; whoever is not measured has nothing to do.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Limits:
    """What all contenders are started with."""

    n_ctx: int  # tokens of one sequence
    n_slots: int
    n_threads: int


@dataclass(frozen=True)
class Contender:
    name: str
    url: str
    model: str  # as requests name it
    pid: int = 0  # of the server this program has started
    command: tuple[str, ...] = ()
    log: Path | None = None
    key: str = ""  # that requests must bring

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"} if self.key else {}

    def processes(self) -> list[psutil.Process]:
        """Its processes; none when it was given by its address."""
        if not self.pid:
            return []
        server = psutil.Process(self.pid)
        return [server, *server.children(recursive=True)]

    def cpu_s(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self.processes())

    def last_words(self) -> str:
        """The end of its log, without Puna's own lines of information."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log else []
        return "\n".join([line for line in lines if " INFO " not in line][-15:])

    def resident_bytes(self) -> int:
        return sum(process.memory_info().rss for process in self.processes())


@contextmanager
def _started(command: Sequence[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **environment},
            start_new_session=True,  # an interrupt from the terminal is for us, who then end it
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(log: Path, process: subprocess.Popen[bytes], url_of: str | None) -> str:
    """Return the server's URL once it answers: *url_of*, or where the log says that Puna listens."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        text = log.read_text(errors="replace")
        url = url_of
        if url is None and "Listening on " in text:
            url = "http://" + text.partition("Listening on ")[2].split()[0]
        if url and _answers(f"{url}/health" if url_of else f"{url}/api/version"):
            return url
        time.sleep(0.05)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
    sys.exit(f"{process.args!r} did not start:\n{tail}")


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


@contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@contextmanager
def puna(
    model: Path, limits: Limits, name: str = "puna", python: str = sys.executable, **environment: str
) -> Iterator[Contender]:
    """This checkout's server with the model loaded, or that of the checkout whose interpreter is *python*."""
    with scratch() as folder:
        # A path that ends in .gguf is a model's name to callers on this machine; blobs of a store have no such name.
        link = folder / "model.gguf"
        link.symlink_to(model)
        settings = {
            "OLLAMA_HOST": "127.0.0.1:0",
            "OLLAMA_MODELS": str(folder / "models"),
            "OLLAMA_NUM_PARALLEL": str(limits.n_slots),
            "OLLAMA_CONTEXT_LENGTH": str(limits.n_ctx),
            "OLLAMA_KEEP_ALIVE": "-1",
        }
        log = folder / "log"
        command = [python, "-m", "puna", "serve"]
        with _started(command, settings | environment, log) as process:
            url = _wait_for(log, process, None)
            options = {"num_ctx": limits.n_ctx, "num_thread": limits.n_threads}
            response = httpx.post(f"{url}/api/generate", json={"model": str(link), "options": options}, timeout=START_TIMEOUT_S)
            if response.status_code != 200:
                sys.exit(f"Puna cannot load {model}: {response.text}")
            told = {key: value for key, value in settings.items() if "PARALLEL" in key or "CONTEXT" in key} | environment
            shown = " ".join(f"{key}={value}" for key, value in told.items())
            yield Contender(name, url, str(link), process.pid, (shown, "puna serve", json.dumps(options)), log)


@contextmanager
def runner(model: Path, limits: Limits) -> Iterator[Contender]:
    """One of this checkout's runners alone, with the model loaded."""
    sizes = ["--n-ctx", str(limits.n_ctx), "--n-parallel", str(limits.n_slots), "--n-threads", str(limits.n_threads)]
    command = [sys.executable, "-m", "puna", "runner", "--model", str(model), "--load", *sizes]
    with scratch() as folder:
        log = folder / "log"
        with _started(command, {}, log) as process:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not (said := log.read_text(errors="replace")).count("\n"):
                if process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"the runner did not start: {said}")
                time.sleep(0.01)
            place = json.loads(said.partition("\n")[0])
            url = f"http://127.0.0.1:{place['port']}"
            found = Contender("runner", url, str(model), process.pid, ("puna runner", *sizes), log, place["key"])
            while (health := _health(found))["status"] != "ready":
                if health["status"] == "error" or time.monotonic() > deadline:
                    sys.exit(f"the runner cannot load {model}: {health}")
                time.sleep(0.01)
            yield found


def _health(runner: Contender) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{runner.url}/health", headers=runner.headers, timeout=START_TIMEOUT_S).json()
    return found


@contextmanager
def llama_server(binary: Path, model: Path, limits: Limits, extra: Sequence[str] = ()) -> Iterator[Contender]:
    """llama-server, with as many tokens in all as its slots may hold together."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    given = ["-m", str(model), "-c", str(limits.n_ctx * limits.n_slots), "-np", str(limits.n_slots), "-t", str(limits.n_threads)]
    command = [str(binary), *given, "--host", "127.0.0.1", "--port", str(port), *extra]
    with scratch() as folder:
        log = folder / "log"
        with _started(command, {}, log) as process:
            url = _wait_for(log, process, f"http://127.0.0.1:{port}")
            yield Contender(binary.name, url, model.name, process.pid, (binary.name, *given[2:], *extra), log)


@contextmanager
def given(url: str, model: str) -> Iterator[Contender]:
    """A server that somebody else has started, with these limits as we hope."""
    yield Contender("peer", url.rstrip("/"), model)
