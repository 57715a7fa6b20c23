"""The runner's process: its port, its end, and the end of its parent."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.patience import PATIENCE_S
from tests.unit.runner.fake_engine import FakeEngine

from puna.errors import FileFormatError
from puna.runner.guard import exit_with_parent
from puna.runner.main import parse
from puna.runner.serve import StartingEngine
from puna.wire import LoadOptions, LoadRequest

ROOT = Path(__file__).parents[3]
RUNNER = [sys.executable, "-m", "tests.unit.runner.fake_engine", "--model", "fake.gguf"]


@contextmanager
def runner(
    *args: str, command: list[str] = RUNNER, stdin: int = subprocess.PIPE
) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    process = subprocess.Popen([*command, *args], cwd=ROOT, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        port = json.loads(process.stdout.readline())["port"]
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
            yield process, client
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def wait_for_status(client: httpx.Client, status: str) -> dict[str, Any]:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        health: dict[str, Any] = client.get("/health").json()
        if health["status"] == status:
            return health
        assert time.monotonic() < deadline, health
        time.sleep(0.02)


def test_a_runner_answers_on_the_port_it_printed() -> None:
    with runner("--load", "--n-ctx", "2048") as (_, client):
        wait_for_status(client, "ready")
        assert client.post("/completion", json={"prompt": "one"}).status_code == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_streams_properly_and_the_process_with_status_0(number: int) -> None:
    with runner("--load") as (process, client):
        wait_for_status(client, "ready")
        with client.stream("POST", "/completion", json={"prompt": "count 1000000"}) as stream:
            received = stream.iter_lines()
            next(received)
            process.send_signal(number)
            assert json.loads(list(received)[-1]) == {"type": "failed", "error": "the runner is ending", "status": 503}
        assert process.wait(PATIENCE_S) == 0


def test_an_engine_that_does_not_close_delays_the_end_but_does_not_prevent_it() -> None:
    code = (
        "import puna.runner.serve as serve, puna.runner.main as main\n"
        "from tests.unit.runner.fake_engine import FakeEngine\n"
        "serve.CLOSE_S, serve.EXIT_S = 0.1, 0.6\n"
        "engine = FakeEngine()\n"
        "engine.close_s = 3600\n"
        "main.main(['--model', 'x'], lambda path: engine)\n"
    )
    with runner(command=[sys.executable, "-c", code]) as (process, client):
        wait_for_status(client, "ready")
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


def test_a_signal_before_the_server_runs_ends_the_process() -> None:
    with runner() as (process, _):  # the port is printed before the server is imported
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


def test_the_end_of_standard_input_ends_the_process() -> None:
    with runner("--load") as (process, client):
        wait_for_status(client, "ready")
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0


def test_without_a_pipe_nobody_is_watched() -> None:
    with runner("--load", stdin=subprocess.DEVNULL) as (process, client):
        wait_for_status(client, "ready")
        assert process.poll() is None


def test_a_runner_does_not_outlive_a_killed_parent() -> None:
    script = (
        "import subprocess, sys, time\n"
        f"runner = subprocess.Popen({RUNNER!r}, stdin=subprocess.PIPE)\n"
        "print(runner.pid, file=sys.stderr, flush=True)\n"
        "time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        pid = int(parent.stderr.readline())
        port = json.loads(parent.stdout.readline())["port"]  # the runner writes into its parent's pipe
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            wait_for_status(client, "launched")
        parent.kill()
        try:
            deadline = time.monotonic() + PATIENCE_S
            while is_open(port):
                assert time.monotonic() < deadline, "the runner outlived its parent"
                time.sleep(0.01)
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def is_open(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionError:
        return False
    return True


def test_a_port_in_use_is_named() -> None:
    with runner() as (_, client):
        port = str(client.base_url.port)
        failed = subprocess.run(
            [*RUNNER, "--port", port], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    assert failed.returncode == 1
    assert failed.stderr.startswith(f"puna runner: cannot listen on 127.0.0.1:{port}: ")


def test_the_port_is_printed_before_anything_heavy_is_imported() -> None:
    code = (
        "import sys, puna.runner.main; "
        "print([m for m in ('numpy', 'uvicorn', 'starlette', 'msgspec', 'asyncio') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_guard_sees_the_other_end_close() -> None:
    read_end, write_end = os.pipe()
    ended: list[bool] = []
    try:
        assert exit_with_parent(read_end, on_end=lambda: ended.append(True))
        os.write(write_end, b"ignored")
        time.sleep(0.05)
        assert not ended
        os.close(write_end)
        deadline = time.monotonic() + PATIENCE_S
        while not ended:
            assert time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        os.close(read_end)


def test_the_guard_passes_over_files() -> None:
    with open(os.devnull) as null:
        assert not exit_with_parent(null.fileno())


def test_options_of_the_first_load() -> None:
    args = parse(["--model", "m.gguf", "--load", "--n-ctx", "8192", "--kv-cache-type", "q8_0", "--no-mmap"])
    assert (args.n_ctx, args.kv_cache_type, args.use_mmap, args.n_batch) == (8192, "q8_0", False, None)


def make_broken() -> FakeEngine:
    raise FileFormatError("m.gguf is not a GGUF file")


def make_empty() -> FakeEngine:
    return FakeEngine(status="launched")


def make_buggy() -> FakeEngine:
    raise ZeroDivisionError("a bug")


@pytest.mark.parametrize(
    ("make", "load", "error"),
    [
        (make_broken, None, "m.gguf is not a GGUF file"),
        (make_buggy, None, "the engine failed to start: ZeroDivisionError: a bug"),
        (make_empty, LoadRequest(options=LoadOptions(n_ctx=2_000_000)), "out of memory"),
    ],
)
def test_an_engine_that_cannot_start_shows_in_health(make: Any, load: LoadRequest | None, error: str) -> None:
    engine = StartingEngine(make, load)
    deadline = time.monotonic() + PATIENCE_S
    while engine.health().status == "launched":
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert (engine.health().status, engine.health().error) == ("error", error)


def test_a_spare_gets_ready_and_becomes_the_runner_of_the_model_that_is_named() -> None:
    with runner("--load", command=[*RUNNER[:3], "--spare"]) as (process, client):
        assert client.get("/health").json()["status"] == "launched"
        assert process.stdin is not None
        for part in (b'{"type": "mod', b'el", "path": "named.gguf"}\n', b"and more\n"):
            process.stdin.write(part)
            process.stdin.flush()
            time.sleep(0.05)
        wait_for_status(client, "ready")
        assert client.post("/completion", json={"prompt": "one"}).status_code == 200
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0


def test_a_spare_that_is_told_nonsense_says_so() -> None:
    with runner("--load", command=[*RUNNER[:3], "--spare"]) as (process, client):
        assert process.stdin is not None
        process.stdin.write(b'{"type": "model", "path": 7}\n')
        process.stdin.flush()
        assert "no model is named in b'{" in wait_for_status(client, "error")["error"]


def test_an_idle_spare_ends_with_its_parent_and_at_a_signal() -> None:
    for is_told in (True, False):
        with runner(command=[*RUNNER[:3], "--spare"]) as (process, client):
            wait_for_status(client, "launched")
            assert process.stdin is not None
            process.terminate() if is_told else process.stdin.close()
            assert process.wait(PATIENCE_S) == 0


def test_a_spare_needs_a_pipe() -> None:
    done = subprocess.run(
        [*RUNNER[:3], "--spare"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 1
    assert "--spare needs a pipe" in done.stderr


def test_a_spare_has_imported_all_that_a_load_uses() -> None:
    """What is imported in the load of a model would be missing from what makes the spare worth its memory."""
    code = (
        "import sys\n"
        "from puna.runner import spare\n"
        "spare.prepare()\n"
        "before = set(sys.modules)\n"
        "from pathlib import Path\n"
        "from puna.runner.engine import Engine\n"
        "from puna.wire import CompletionRequest, Done, LoadRequest\n"
        "from tests.tiny import write_llama\n"
        "import tempfile, threading, time\n"
        "known = set(sys.modules)\n"
        "with tempfile.TemporaryDirectory() as folder:\n"
        "    engine = Engine(write_llama(Path(folder) / 'tiny.gguf', n_layers=1))\n"
        "    assert engine.load(LoadRequest()).success\n"
        "    while engine.health().status != 'ready': time.sleep(0.01)\n"
        "    ended = threading.Event()\n"
        "    engine.submit(CompletionRequest(prompt='a', n_predict=3), lambda r: isinstance(r, Done) and ended.set())\n"
        "    assert ended.wait(120)\n"
        "    engine.close()\n"
        "print(sorted(m for m in set(sys.modules) - known if not m.startswith('encodings')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
