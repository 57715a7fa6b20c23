"""The command line with the real server, engine and a tiny model: what a person types, in the order they would."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.patience import PATIENCE_S, wait_until
from tests.ports import kept_free
from tests.processes import is_alive
from tests.tiny import write_llama
from tests.unit.cli.pty_driver import terminal

Puna = Callable[..., subprocess.CompletedProcess[str]]

MODELFILE = """\
FROM ./tiny.gguf
PARAMETER temperature 0
PARAMETER num_predict 12
PARAMETER num_ctx 512
SYSTEM Answer in few words.
"""
# Where a limit is taken away, an answer goes on for ten contexts: longer than any test looks at it.
LONG = MODELFILE.replace("tiny.gguf", "long.gguf").replace("num_ctx 512", f"num_ctx {1 << 16}\nPARAMETER ignore_eos true")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and a recipe for it."""
    folder = tmp_path_factory.mktemp("home")
    write_llama(folder / "tiny.gguf", n_ctx=512)
    (folder / "Modelfile").write_text(MODELFILE)
    write_llama(folder / "long.gguf", n_layers=1, n_ctx=1 << 16)
    (folder / "Longfile").write_text(LONG)
    return folder


@pytest.fixture(scope="module")
def env(home: Path) -> Iterator[dict[str, str]]:
    """Nobody listens at OLLAMA_HOST."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OLLAMA_")}
    with kept_free() as port:
        yield {**kept, "HOME": str(home), "TERM": "xterm", "OLLAMA_HOST": f"127.0.0.1:{port}"}


@pytest.fixture(scope="module")
def puna(env: dict[str, str], home: Path) -> Puna:
    def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "puna", *arguments]
        return subprocess.run(command, input=stdin, env=env, cwd=home, capture_output=True, text=True, timeout=PATIENCE_S)

    return run


@pytest.fixture(scope="module")
def model(puna: Puna) -> str:
    """A model in the store, made from the recipe."""
    done = puna("create", "tiny")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "success"
    return "tiny"


@pytest.fixture(scope="module")
def long(puna: Puna) -> str:
    """A model that answers for as long as it may."""
    done = puna("create", "long", "-f", "Longfile")
    assert done.returncode == 0, done.stderr
    return "long"


@pytest.fixture
def server(env: dict[str, str], home: Path) -> Iterator[subprocess.Popen[bytes]]:
    """``puna serve`` at OLLAMA_HOST."""
    with subprocess.Popen([sys.executable, "-m", "puna", "serve"], env=env, cwd=home, stderr=subprocess.DEVNULL) as process:
        host, port = env["OLLAMA_HOST"].split(":")
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                socket.create_connection((host, int(port))).close()
                break
            except ConnectionRefusedError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        yield process
        process.terminate()
        process.wait(PATIENCE_S)


def assert_ends(processes: list[psutil.Process]) -> None:
    wait_until(lambda: not any(map(is_alive, processes)))


def test_an_answer_without_a_server(puna: Puna, model: str) -> None:
    done = puna("run", model, "hello world", "--verbose")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "\x1b" not in done.stdout
    assert re.search(r"^eval count: +12 token\(s\)$", done.stderr, re.MULTILINE)
    assert re.search(r"^prompt eval rate: +[\d.]+ tokens/s$", done.stderr, re.MULTILINE)


def test_the_same_question_from_a_pipe_gets_the_same_answer(puna: Puna, model: str) -> None:
    by_argument = puna("run", model, "hello world once upon")
    by_pipe = puna("run", model, "once upon", stdin="hello world")
    assert by_argument.stdout == by_pipe.stdout != ""


def test_list_show_and_cp(puna: Puna, model: str) -> None:
    heading, row = puna("list").stdout.splitlines()
    assert heading.split() == ["NAME", "ID", "SIZE", "MODIFIED"]
    assert re.fullmatch(r"tiny:latest {4}[0-9a-f]{12} {4}[\d.]+ [KM]B {4}.* (ago|from now)", row)
    shown = puna("show", model).stdout
    for text in (
        "architecture        llama",
        "context length      512",
        "completion",
        "num_predict    12",
        "Answer in few words.",
    ):
        assert text in shown
    assert json.loads(puna("show", "--json", model).stdout)["details"]["family"] == "llama"
    assert puna("cp", model, "second").stdout == "copied 'tiny' to 'second'\n"
    listed = {entry["name"] for entry in json.loads(puna("list", "--json").stdout)["models"]}
    assert listed == {"tiny:latest", "second:latest"}
    assert puna("rm", "second").stdout == "deleted 'second'\n"
    assert puna("run", "second").returncode == 1


def test_what_show_prints_makes_the_model_again(puna: Puna, model: str) -> None:
    recipe = puna("show", "--modelfile", model).stdout
    assert puna("create", "again", "-f", "-", stdin=recipe).returncode == 0
    assert puna("run", "again", "hello").stdout == puna("run", model, "hello").stdout
    puna("rm", "again")


def test_a_file_where_it_lies(puna: Puna, home: Path) -> None:
    assert "llama" in puna("show", "./tiny.gguf").stdout
    shown = puna("run", "./tiny.gguf", "")
    assert (shown.returncode, shown.stdout) == (0, ""), shown.stderr


def test_errors_name_what_is_wrong(puna: Puna, home: Path) -> None:
    (home / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
    for arguments in (["run", "./broken.gguf", "hi"], ["show", "./broken.gguf"], ["show", "nobody"], ["rm", "nobody"]):
        done = puna(*arguments)
        assert done.returncode == 1, arguments
        assert re.match(r"Error: \S.*\n", done.stderr), done.stderr
        assert "Traceback" not in done.stderr


def test_ps_and_stop(puna: Puna, model: str, server: subprocess.Popen[bytes]) -> None:
    assert puna("ps").stdout.splitlines() == ["NAME    ID    SIZE    PROCESSOR    CONTEXT    UNTIL"]
    assert puna("run", "--keepalive", "10h", model, "hello").returncode == 0
    assert re.fullmatch(
        r"tiny:latest +[0-9a-f]{12} +[\d.]+ [KMG]B +100% CPU +512 +10 hours from now", puna("ps").stdout.splitlines()[1]
    )
    assert puna("stop", model).returncode == 0
    wait_until(lambda: not json.loads(puna("ps", "--json").stdout)["models"])
    assert puna("stop", "nobody").stderr == 'Error: couldn\'t find model "nobody" to stop\n'


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_the_command(env: dict[str, str], home: Path, puna: Puna, long: str, how: signal.Signals) -> None:
    """A private server with a loaded runner, whose owner ends in the middle of an answer."""
    assert puna("create", "endless", "-f", "-", stdin=f"FROM {long}\nPARAMETER num_predict -1\n").returncode == 0
    command = [sys.executable, "-m", "puna", "run", "endless", "go"]
    with subprocess.Popen(command, env=env, cwd=home, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert os.read(child.stdout.fileno(), 10)
        family = psutil.Process(child.pid).children(recursive=True)
        assert len(family) >= 2  # server and runner
        child.send_signal(how)
        child.wait(PATIENCE_S)
    assert_ends(family)


def test_a_conversation(env: dict[str, str], home: Path, long: str) -> None:
    with terminal("run", long, env=env, cwd=home) as repl:
        repl.wait_for(">>> ")
        repl.send("/set verbose\r")
        repl.wait_for("Set 'verbose' mode.")
        repl.wait_for(">>> ")
        repl.send('"""hello\rworld"""\r')
        repl.wait_for("eval rate:")
        repl.wait_for(">>> ")
        repl.send("/set parameter num_predict -1\r")
        repl.wait_for(">>> ")
        before = len(repl.raw)
        repl.send("go on\r")
        while len(repl.raw) < before + 10_000:  # more than the prompt takes: these are lines of the answer
            repl.wait_for("\n")
        repl.send("\x03")
        repl.wait_for(">>> ")
        repl.send("/show system\r")
        repl.wait_for("Answer in few words.")
        repl.wait_for(">>> ")
        repl.send("/save kept\r")
        repl.wait_for("Created new model 'kept'")
        repl.wait_for(">>> ")
        family = psutil.Process(repl.process.pid).children(recursive=True)
        assert family
        repl.send("/bye\r")
        assert repl.wait_for_end()[1] == 0
        assert_ends(family)


def test_files_of_other_programs_are_listed_and_run_where_they_lie(puna: Puna, home: Path) -> None:
    """The hub's cache has links to files whose names say nothing; LM Studio has a folder for each author."""
    repository = home / ".cache" / "huggingface" / "hub" / "models--ann--Tiny-GGUF"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    write_llama(repository / "blobs" / "etag", n_ctx=512)
    os.symlink("../../blobs/etag", snapshot / "tiny.gguf")
    studio = home / ".lmstudio" / "models" / "bob" / "Other"
    studio.mkdir(parents=True)
    write_llama(studio / "other.gguf", n_ctx=512)
    before = sorted(path for path in (home / ".cache").rglob("*") if "puna" not in path.parts)
    assert ".gguf" not in puna("list").stdout
    listed = [line.split()[0] for line in puna("list", "--all").stdout.splitlines()]
    assert {str(snapshot / "tiny.gguf"), str(studio / "other.gguf")} <= set(listed)
    files = json.loads(puna("list", "--all", "--json", "tiny").stdout)["files"]
    assert [item["path"] for item in files] == [str(snapshot / "tiny.gguf")]
    answer = puna("run", str(snapshot / "tiny.gguf"), "--nowordwrap", "hello")
    assert answer.returncode == 0, answer.stderr
    assert sorted(path for path in (home / ".cache").rglob("*") if "puna" not in path.parts) == before
