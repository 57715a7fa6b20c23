"""The server that a command starts for itself: it is there for the first request and gone afterwards, whatever happens."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from tests.patience import PATIENCE_S
from tests.ports import kept_free
from tests.unit.cli.pty_driver import terminal

from puna.cli.private_server import SERVE_COMMAND

SCRIPT = str(Path(__file__).with_name("fake_serve.py"))
ROOT = Path(__file__).parents[3]


@pytest.fixture
def env(environment: dict[str, str], tmp_path: Path) -> Iterator[dict[str, str]]:
    """Nobody listens at OLLAMA_HOST; the servers that are started leave their process ids behind."""
    with kept_free() as port:
        host = f"127.0.0.1:{port}"
        yield {**environment, "OLLAMA_HOST": host, "FAKE_PIDS": str(tmp_path / "pids"), "PYTHONPATH": str(ROOT)}


def puna(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def pids(env: dict[str, str]) -> list[int]:
    """Processes of all servers that were started."""
    path = Path(env["FAKE_PIDS"])
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def running(env: dict[str, str]) -> list[int]:
    """Processes of the fake program, commands and servers, that belong to this test."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if SCRIPT in process.cmdline() and process.environ().get("FAKE_PIDS") == env["FAKE_PIDS"]:
                found.append(process.pid)
    return found


def assert_gone(pids: list[int], within_s: float = PATIENCE_S) -> None:
    assert pids
    deadline = time.monotonic() + within_s
    while alive := [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, f"still running: {alive}"
        time.sleep(0.02)


@pytest.mark.parametrize("arguments", [["run", "echo", "hi"], ["list"], ["show", "echo"], ["pull", "m"], ["rm", "echo"]])
def test_commands_bring_their_own_server(env: dict[str, str], arguments: list[str]) -> None:
    done = puna(env, *arguments)
    assert done.returncode == 0, done.stderr
    if arguments[0] == "run":
        assert done.stdout == "hi \n"
    assert len(pids(env)) == 1
    assert_gone(pids(env), within_s=0)


def test_nothing_is_started_when_a_server_listens(env: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:  # answers nobody, but is there
        sock.settimeout(PATIENCE_S)
        listening = {**env, "OLLAMA_HOST": f"127.0.0.1:{sock.getsockname()[1]}"}
        with subprocess.Popen([sys.executable, SCRIPT, "list"], env=listening, stderr=subprocess.DEVNULL) as child:
            sock.accept()[0].close()  # the probe
            with sock.accept()[0] as connection:
                assert connection.recv(100).startswith(b"GET /api/tags ")
            assert child.wait(PATIENCE_S) == 1
    assert pids(env) == []


@pytest.mark.parametrize("line", ["run --help", "list --nonsense", "run ./absent.gguf hi", "create x -f absent"])
def test_a_command_that_does_not_get_far_leaves_nothing(env: dict[str, str], line: str) -> None:
    """The server is started before the command line is read, for a command that may not come to need it."""
    puna(env, *line.split())
    assert running(env) == []


def test_another_machine_is_not_replaced(env: dict[str, str]) -> None:
    done = puna({**env, "OLLAMA_HOST": "http://puna.invalid:1"}, "list")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: could not connect to a Puna server at http://puna.invalid:1")
    assert pids(env) == []


def test_a_server_that_cannot_start_leaves_its_last_words(env: dict[str, str]) -> None:
    done = puna({**env, "FAKE_SERVE": "die"}, "run", "echo", "hi")
    assert done.returncode == 1
    assert done.stderr == "Error: the private server ended with status 3:\nthe store is on fire\n"


def test_one_that_takes_a_moment_to_die_leaves_them_too(env: dict[str, str]) -> None:
    """Its sockets close first, and on a busy machine long before."""
    done = puna({**env, "FAKE_SERVE": "die slowly"}, "list")
    assert done.returncode == 1
    assert done.stderr == "Error: the private server ended with status 1:\nthe store is on fire\n"


def test_debug_shows_the_servers_log(env: dict[str, str]) -> None:
    done = puna({**env, "FAKE_SERVE": "die", "OLLAMA_DEBUG": "1"}, "list")
    assert done.stderr == "the store is on fire\nError: the private server ended with status 3\n"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_it_ends_with_its_owner(env: dict[str, str], how: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, SCRIPT, "run", "endless", "go"], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert os.read(child.stdout.fileno(), 10)
        assert len(running(env)) == 2  # the command and its server
        child.send_signal(how)
        assert child.wait(PATIENCE_S) == (130 if how == signal.SIGINT else -how)
    assert_gone(pids(env))


def test_one_that_hangs_is_killed_with_its_runners(env: dict[str, str]) -> None:
    with subprocess.Popen(
        [sys.executable, SCRIPT, "run", "endless", "go"],
        env={**env, "FAKE_SERVE": "hang"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        assert os.read(child.stdout.fileno(), 10)
        child.kill()
    assert len(pids(env)) == 2
    assert_gone(pids(env))


def test_ctrl_c_in_a_session_is_not_for_the_server(env: dict[str, str], tmp_path: Path) -> None:
    with terminal("run", "endless", env=env, cwd=tmp_path, script=[SCRIPT]) as repl:
        repl.wait_for(">>> ")
        repl.send("go\r")
        repl.wait_for("You said: go..")
        repl.send("\x03")
        repl.wait_for(">>> ")
        repl.send("/load echo\r")
        repl.wait_for("Loading model 'echo'")
        repl.wait_for(">>> ")
        repl.send("hello\r")
        repl.wait_for("You said: hello")
        repl.wait_for(">>> ")
        repl.send("\x04")
        assert repl.wait_for_end()[1] == 0
    assert len(pids(env)) == 1
    assert_gone(pids(env))


def test_a_folder_named_puna_is_not_mistaken_for_the_package(env: dict[str, str], tmp_path: Path) -> None:
    """``python -m puna``, as servers and runners are started, takes what lies in the current directory first."""
    (tmp_path / "puna").mkdir()
    (tmp_path / "puna" / "__main__.py").write_text("print('hijacked')")
    done = subprocess.run(
        [*SERVE_COMMAND, "--help"], cwd=tmp_path, env=env, capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    assert "hijacked" not in done.stdout
    assert "A server of one command's own." in done.stdout
    shown = puna({**env, "FAKE_SERVE": "environment"}, "list").stderr
    assert "PYTHONSAFEPATH=1" in shown
