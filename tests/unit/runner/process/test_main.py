"""The runner's process: its port, its end, and the end of its parent."""

from __future__ import annotations

import itertools
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
import psutil
import pytest
from tests.patience import PATIENCE_S
from tests.tiny import write_llama
from tests.unit.runner.fake_engine import FakeEngine

from puna.errors import FileFormatError
from puna.guard import exit_with_parent
from puna.runner.process.main import _load_request, parse
from puna.runner.process.starting import StartingEngine
from puna.wire import Failed, LoadOptions, LoadRequest, decode_reply

ROOT = Path(__file__).parents[4]
RUNNER = [sys.executable, "-m", "tests.unit.runner.fake_engine", "--model", "fake.gguf"]


@contextmanager
def runner(
    *args: str, command: list[str] = RUNNER, stdin: int = subprocess.PIPE
) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    process = subprocess.Popen([*command, *args], cwd=ROOT, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        key = {"authorization": f"Bearer {said['key']}"}
        with httpx.Client(base_url=f"http://127.0.0.1:{said['port']}", timeout=PATIENCE_S, headers=key) as client:
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
            assert decode_reply(list(received)[-1]) == Failed(error="the runner is ending", status=503)
        assert process.wait(PATIENCE_S) == 0


def test_an_engine_that_does_not_close_delays_the_end_but_does_not_prevent_it() -> None:
    code = (
        "import puna.runner.process.serve as serve, puna.runner.process.main as main\n"
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
        said = json.loads(parent.stdout.readline())  # the runner writes into its parent's pipe
        port, key = said["port"], {"authorization": f"Bearer {said['key']}"}
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=key, timeout=PATIENCE_S) as client:
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
        "import sys, puna.runner.process.main; "
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


def test_options_of_the_first_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    args = parse(["--model", "m.gguf", "--load", "--n-ctx", "8192", "--kv-cache-type", "q8_0", "--no-mmap"])
    assert (args.n_ctx, args.kv_cache_type, args.use_mmap, args.n_batch) == (8192, "q8_0", False, None)
    expected = LoadOptions(n_ctx=8192, kv_cache_type="q8_0", use_mmap=False, models=str(tmp_path))
    assert _load_request(args) == LoadRequest(operation="commit", options=expected)


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


class Child:
    """A runner at the other end of a socket, as a server has it."""

    def __init__(self, *args: str) -> None:
        self.own, end = socket.socketpair()
        with end:
            self.process = subprocess.Popen([*RUNNER[:3], *args], cwd=ROOT, stdin=end.fileno())
        self.own.settimeout(PATIENCE_S)
        self._lines = self.own.makefile("rb")
        self._numbers = itertools.count()
        self.greeting = self._lines.readline()

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self.own.sendall(json.dumps({"type": "call", "id": number, "path": path, "body": body}).encode() + b"\n")
        [[found, reply]] = json.loads(self._lines.readline())
        assert found == number
        answer: dict[str, Any] = reply
        return answer

    def wait_for_status(self, status: str) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            health: dict[str, Any] = self.ask("/health")["body"]
            if health["status"] == status:
                return health
            assert time.monotonic() < deadline, health
            time.sleep(0.02)

    def lines(self, prompt: str) -> Iterator[dict[str, Any]]:
        """The replies to a completion, as they come."""
        command = {"type": "complete", "id": next(self._numbers), "request": {"prompt": prompt}}
        self.own.sendall(json.dumps(command).encode() + b"\n")
        while True:
            for _, reply in json.loads(self._lines.readline()):
                yield reply
                if reply["type"] != "piece":
                    return

    def close(self) -> None:
        self._lines.close()
        self.own.close()


@contextmanager
def child(*args: str) -> Iterator[Child]:
    child = Child(*args)
    try:
        yield child
    finally:
        child.close()
        child.process.kill()
        child.process.wait()


def test_a_child_greets_and_answers_over_its_socket_alone() -> None:
    with child("--channel", "--model", "fake.gguf") as runner:
        assert runner.greeting == b"[]\n"
        runner.wait_for_status("launched")
        assert runner.ask("/tokenize", content="ab") == {
            "type": "failed",
            "error": "model is not loaded, POST /load first",
            "status": 503,
            "lacks_model": True,
        }
        assert runner.ask("/load", options={"n_ctx": 2048})["body"]["n_ctx"] == 2048
        assert runner.ask("/tokenize", content="ab")["body"] == {"tokens": [1, 97, 98]}
        assert runner.ask("/embedding", inputs=["abc"])["body"]["embeddings"] == [[3.0, 0.5]]
        assert runner.ask("/load", operation="burn")["status"] == 400
        assert runner.ask("/nothing")["status"] == 404
        assert [c for c in psutil.Process(runner.process.pid).net_connections() if c.status == psutil.CONN_LISTEN] == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_childs_requests_properly_and_the_process_with_status_0(number: int) -> None:
    with child("--channel", "--model", "fake.gguf", "--load") as runner:
        runner.wait_for_status("ready")
        replies = runner.lines("count 1000000")
        next(replies)
        runner.process.send_signal(number)
        *_, last = replies
        assert (last["type"], last["error"], last["status"]) == ("failed", "the runner is ending", 503)
        assert runner.process.wait(PATIENCE_S) == 0


def test_a_signal_ends_a_child_whichever_thread_the_system_gives_it_to() -> None:
    """Nothing interrupts what the main thread waits for then, as nothing does for a signal just before it begins to wait."""
    code = (
        "import signal, threading, time\n"
        "from puna.runner.process import serve\n"
        "from puna.runner.transport.outbox import Outbox\n"
        "from tests.unit.runner.fake_engine import FakeEngine\n"
        "import socket, pathlib\n"
        "def end():\n"
        "    while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:\n"
        "        time.sleep(0.01)\n"
        "    time.sleep(0.2)\n"  # the main thread waits by then, or is about to
        "    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)\n"
        "threading.Thread(target=end, daemon=True).start()\n"
        "serve.EXIT_S = 1e6\n"
        "ended = []\n"
        "serve.serve_parent(FakeEngine(pathlib.Path('fake.gguf')), Outbox(socket.socketpair()[0]), lambda: ended.append(1))\n"
        "print(ended)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert found.stdout == "[1]\n"


def test_a_child_ends_with_its_parent() -> None:
    with child("--channel", "--model", "fake.gguf", "--load") as runner:
        runner.wait_for_status("ready")
        runner.close()
        assert runner.process.wait(PATIENCE_S) == 0


def test_a_child_imports_nothing_of_http() -> None:
    """It takes time at every load, and memory as long as the model stays."""
    code = (
        "import os, socket, sys, threading, time\n"
        "own, end = socket.socketpair()\n"
        "os.dup2(end.fileno(), 0)\n"
        "import puna.runner.process.main as main\n"
        "from tests.unit.runner.fake_engine import FakeEngine\n"
        "def look():\n"
        "    own.recv(10)\n"
        '    own.sendall(b\'{"type": "call", "id": 1, "path": "/health"}\\n\')\n'
        "    own.recv(10)\n"
        "    print([m for m in ('asyncio', 'uvicorn', 'starlette', 'httptools') if m in sys.modules], flush=True)\n"
        "    os._exit(0)\n"
        "threading.Thread(target=look).start()\n"
        "main.main(['--model', 'x', '--channel'], lambda path: FakeEngine())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_spare_gets_ready_and_becomes_the_runner_of_the_model_that_is_named() -> None:
    with child("--spare", "--load") as runner:
        assert runner.ask("/health")["body"]["status"] == "launched"
        for part in (b'{"type": "mod', b'el", "path": "named.gguf"}\n', b"and more\n"):
            runner.own.sendall(part)
            time.sleep(0.05)
        runner.wait_for_status("ready")
        assert [reply["type"] for reply in runner.lines("one")] == ["piece", "done"]
        runner.close()
        assert runner.process.wait(PATIENCE_S) == 0


def test_a_spare_that_is_told_nonsense_says_so() -> None:
    with child("--spare", "--load") as runner:
        runner.own.sendall(b'{"type": "model", "path": 7}\n')
        assert "no model is named in b'{" in runner.wait_for_status("error")["error"]


def test_an_idle_spare_ends_with_its_parent_and_at_a_signal() -> None:
    for is_told in (True, False):
        with child("--spare") as runner:
            runner.wait_for_status("launched")
            runner.process.terminate() if is_told else runner.close()
            assert runner.process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("arguments", [["--spare"], ["--channel", "--model", "fake.gguf"]])
@pytest.mark.parametrize("stdin", [subprocess.DEVNULL, subprocess.PIPE])
def test_a_channel_needs_a_socket(arguments: list[str], stdin: int) -> None:
    with subprocess.Popen([*RUNNER[:3], *arguments], cwd=ROOT, stdin=stdin, stderr=subprocess.PIPE, text=True) as process:
        _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "need a socket as standard input" in said


def test_a_spare_has_imported_all_that_a_load_uses(tmp_path: Path) -> None:
    """What is imported in the load of a model would be missing from what makes the spare worth its memory."""
    code = (
        "import sys\n"
        "from puna.runner.process import spare\n"
        "spare.prepare()\n"
        "before = set(sys.modules)\n"
        "from pathlib import Path\n"
        "from puna.runner.engine import Engine\n"
        "from puna.wire import CompletionRequest, Done, LoadRequest\n"
        "import threading, time\n"
        "known = set(sys.modules)\n"
        "engine = Engine(Path(sys.argv[1]))\n"
        "assert engine.load(LoadRequest()).success\n"
        "while engine.health().status != 'ready': time.sleep(0.01)\n"
        "ended = threading.Event()\n"
        "engine.submit(CompletionRequest(prompt='a', n_predict=3), lambda r: isinstance(r, Done) and ended.set())\n"
        "assert ended.wait(120)\n"
        "engine.close()\n"
        "print(sorted(m for m in set(sys.modules) - known if not m.startswith('encodings')))\n"
    )
    model = write_llama(tmp_path / "tiny.gguf", n_layers=1)
    done = subprocess.run(
        [sys.executable, "-c", code, model], cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert done.stdout.strip() == "[]", done.stderr
