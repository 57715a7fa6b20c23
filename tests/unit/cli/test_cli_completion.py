"""What Tab makes of the name of a model, in a real bash and as other shells ask."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.patience import PATIENCE_S
from tests.unit.api.fake_server import FakeServer
from tests.unit.cli.pty_driver import Screen, terminal
from tests.unit.store.gguf_files import write_model

from puna.cli.completion import join_words
from puna.store.recipe import Recipe
from puna.store.store import Store

ROOT = Path(__file__).parents[3]
TAB = "\t"


@pytest.fixture
def nobody(environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """No server listens; the folder of models has some."""
    store = Store(tmp_path / ".ollama" / "models")
    digest = store.blobs.import_file(write_model(tmp_path / "m.gguf")).digest
    store.create("smollm2:135m", Recipe(files={"m.gguf": digest}))
    store.copy("smollm2:135m", "smollm2:1.7b")
    store.copy("smollm2:135m", "hf.co/ann/Tiny-GGUF:Q4_K_M")
    return {**environment, "OLLAMA_HOST": "127.0.0.1:1"}


@pytest.fixture
def bash(nobody: dict[str, str], tmp_path: Path) -> Iterator[Screen]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{nobody['PATH']}"
    script = ["-c", "import os; os.execvp('bash', ['bash', '--norc', '--noprofile', '-i'])"]
    with terminal(env={**nobody, "PATH": path, "PS1": "$ "}, cwd=tmp_path, script=script, columns=120) as screen:
        # Spelt otherwise than it is shown: what was typed is no prompt yet.
        screen.send(f"PS1='rea''dy: '; source {ROOT}/share/bash-completion/completions/puna\r")
        screen.wait_for("completions/puna")
        screen.wait_for("ready: ")
        yield screen


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("puna sh", "puna show "),
        ("puna show smoll", "puna show smollm2:1"),
        ("puna show smollm2:", "puna show smollm2:1"),
        ("puna show smollm2:13", "puna show smollm2:135m "),
        ("puna rm smollm2:135m smollm2:1.", "puna rm smollm2:135m smollm2:1.7b "),
        ("puna run hf", "puna run hf.co/ann/Tiny-GGUF:Q4_K_M "),
        ("puna list smollm2:13", "puna list smollm2:135m "),
        ("puna cp smollm2:13", "puna cp smollm2:135m "),
    ],
)
def test_bash(bash: Screen, typed: str, completed: str) -> None:
    bash.send(typed + TAB)
    bash.wait_until_shown(f"ready: {completed}".rstrip())


def test_names_are_those_of_the_server_where_one_runs(nobody: dict[str, str], fake: FakeServer) -> None:
    assert asked(nobody, "show", "") == ["hf.co/ann/Tiny-GGUF:Q4_K_M", "smollm2:1.7b", "smollm2:135m"]
    here = {**nobody, "OLLAMA_HOST": fake.address.url}
    assert asked(here, "show", "") == ["echo:latest", "thinker:1b"]
    assert asked(here, "stop", "") == ["echo:latest"]
    assert asked(here, "pull", "smo") == ["smollm2:135m"]
    elsewhere = {**nobody, "OLLAMA_HOST": "192.0.2.1:1"}
    assert asked(elsewhere, "stop", "x") == []


def asked(env: dict[str, str], *words: str) -> list[str]:
    """As bash's function asks."""
    env = {**env, "_PUNA_COMPLETE": "complete_bash", "COMP_WORDS": "\n".join(("puna", *words)), "COMP_CWORD": str(len(words))}
    command = [sys.executable, "-m", "puna"]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S).stdout.split()


@pytest.mark.parametrize(
    ("words", "joined", "before"),
    [
        (["puna", "show", "a"], ["puna", "show", "a"], ""),
        (["puna", "show", "a", ":", "1"], ["puna", "show", "a:1"], "a:"),
        (["puna", "show", "a", ":"], ["puna", "show", "a:"], "a:"),
        (["puna", "cp", "a", ":", "1", "b"], ["puna", "cp", "a:1", "b"], ""),
        (["puna", "show", "host", ":", "5000/x/y", ":", "t"], ["puna", "show", "host:5000/x/y:t"], "host:5000/x/y:"),
    ],
)
def test_words_are_put_together_at_colons(words: list[str], joined: list[str], before: str) -> None:
    environ = {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
    assert join_words(environ) == before
    assert environ == {"COMP_WORDS": "\n".join(joined), "COMP_CWORD": str(len(joined) - 1)}
