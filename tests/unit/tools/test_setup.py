from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tools import setup

from puna.native.providers import PREBUILT, SOURCE

ROOT = Path(setup.__file__).resolve().parent.parent


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of its own: no test may touch the environment it runs in."""
    venv = tmp_path / ".venv"
    venv.mkdir()
    for name, path in {"VENV": venv, "STAMP": venv / ".ready", "LOG": venv / "setup.log", "CACHE": tmp_path / "cache"}.items():
        monkeypatch.setattr(setup, name, path)
    monkeypatch.setattr(setup, "PYTHON", Path(sys.executable))
    return tmp_path


@pytest.mark.usefixtures("elsewhere")
def test_the_end_of_the_output_is_shown_when_a_step_fails(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys\nfor i in range(100): print('line', i)\nsys.exit(3)"
    with pytest.raises(setup.SetupError, match=r"(?s)line 71\n.*line 99\n.*Trying… failed \(exit status 3\).*do this") as caught:
        setup.run([sys.executable, "-c", code], "Trying…", os.environ, next_step="do this")
    assert "line 69\n" not in str(caught.value)
    assert capfd.readouterr().out == "Trying…\n"
    assert "line 0\n" in setup.LOG.read_text()


@pytest.mark.usefixtures("elsewhere")
def test_nothing_is_done_when_nothing_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[object] = []

    def install(wanted: dict[str, object]) -> None:
        installed.append(wanted["dev"])
        setup.STAMP.write_text(json.dumps(wanted))

    monkeypatch.setattr(setup, "install", install)
    setup.setup(is_dev=False)
    setup.setup(is_dev=False)
    assert installed == [False]
    setup.setup(is_dev=True)
    setup.setup(is_dev=True)
    setup.setup(is_dev=False)  # what tests need may stay
    assert installed == [False, True]
    for damaged in ("", "[]", '{"inputs": 1}'):
        setup.STAMP.write_text(damaged)
        setup.setup(is_dev=False)
    assert len(installed) == 5


def test_a_compiler_that_appears_is_a_reason_to_install_again(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []

    def install(wanted: dict[str, bool]) -> None:
        calls.append(wanted["compiler"])
        setup.STAMP.write_text(json.dumps(wanted))

    monkeypatch.setattr(setup, "install", install)
    empty = elsewhere / "empty"
    empty.mkdir()
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(empty))
    setup.setup(is_dev=False)
    (empty / "g++").write_text("#!/bin/sh\n")
    (empty / "g++").chmod(0o755)
    setup.setup(is_dev=False)
    setup.setup(is_dev=False)
    assert calls == [False, True]


@pytest.mark.parametrize(("is_dev", "asked"), [(False, []), (True, ["--group", "dev"])])
def test_what_is_installed_needs_no_compiler_and_only_what_runs(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, is_dev: bool, asked: list[str]
) -> None:
    script = elsewhere / "pip.py"
    script.write_text(
        "import pathlib, sys\n"
        "with open(pathlib.Path(__file__).with_name('calls'), 'a') as calls: calls.write(' '.join(sys.argv[1:]) + '\\n')\n"
    )
    monkeypatch.setattr(setup, "pip", lambda *arguments: [sys.executable, "-S", str(script), *arguments])
    monkeypatch.setattr(setup, "make_venv", lambda: None)
    monkeypatch.setattr(setup, "WEB", elsewhere)
    (elsewhere / "libraries.py").write_text("import pathlib; pathlib.Path(__file__).with_name('fetched').touch()\n")
    setup.install({"dev": is_dev, "compiler": False})
    assert (elsewhere / "fetched").exists() is is_dev
    _, install = [call.split() for call in (elsewhere / "calls").read_text().splitlines()]
    assert install[install.index("--editable") :] == ["--editable", ".", *asked]
    assert json.loads(setup.STAMP.read_text()) == {"dev": is_dev, "compiler": False}


def test_the_versions_that_are_named_twice_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert PREBUILT in project["dependencies"]
    assert project["optional-dependencies"]["native"] == [SOURCE]
    assert {PREBUILT, SOURCE} <= set(lines)


def test_everything_the_project_asks_for_is_pinned_and_no_index_is_named() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[\w.]+", line) for line in lines)
    pinned = {_normal(line.split("==")[0]) for line in lines}
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = [
        *pyproject["project"]["dependencies"],
        *pyproject["dependency-groups"]["dev"],
        *(
            name
            for extra in pyproject["project"]["optional-dependencies"].values()
            for name in extra
            if not name.startswith("puna")
        ),
        *pyproject["build-system"]["requires"],
    ]
    names = {_normal(match[0]) for text in asked if (match := re.match(r"[\w.-]+", text))}
    assert names - pinned == set()


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _without_make() -> dict[str, str]:
    """The environment as it is outside ``make test``, which hands its own flags down."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}


@pytest.mark.parametrize(
    ("target", "setup"),
    [
        *((target, "python3 tools/setup.py") for target in ("run", "native")),
        *(
            (target, "python3 tools/setup.py --dev")
            for target in ("test", "test-all", "quick", "watch", "check", "bench", "format")
        ),
    ],
)
def test_every_target_first_makes_the_environment_ready(target: str, setup: str) -> None:
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True, env=_without_make())
    lines = done.stdout.splitlines()
    assert lines[0] == setup
    assert ".venv/bin/" in lines[1]


@pytest.mark.parametrize(
    ("arguments", "options", "sent"),
    [
        (["PROMPT=it costs $5 & `echo no` \"quoted\" 'too'"], ["num_predict=500"], "it costs $5 & `echo no` \"quoted\" 'too'"),
        (["PROMPT=--help", "TOKENS=7"], ["num_predict=7"], "--help"),
        ([], ["temperature=0", "num_predict=64"], "What is the capital of France? Answer in one short sentence."),
    ],
)
def test_the_prompt_reaches_the_command_as_it_was_given(
    tmp_path: Path, arguments: list[str], options: list[str], sent: str
) -> None:
    """And the answer is bounded: a small model may find no end."""
    puna = tmp_path / "puna"
    puna.write_text('#!/bin/sh\nfor word; do printf "%s\\n" "$word"; done\n')
    puna.chmod(0o755)
    command = ["make", "-s", "run", f"BIN={tmp_path}", "PYTHON=true", *arguments]
    environ = {**_without_make(), "PROMPT": "%~ of some shell"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=environ, stdin=subprocess.DEVNULL)
    flags = [word for option in options for word in ("-o", option)]
    assert done.stdout.splitlines() == ["run", *flags, "smollm2:135m", "--", sent]
