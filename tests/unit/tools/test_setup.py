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
from tools.setup import Compiler, Processor

from puna.native.library import PACKAGE

ROOT = Path(setup.__file__).resolve().parent.parent
PLAIN = Processor("Example CPU", frozenset({"avx2", "avx512f"}))
AMX = Processor("Example CPU", frozenset({"avx2", "amx_tile", "amx_int8"}))
GCC_12 = Compiler("cc", "c++", 12, ("12.2.0", "12.2.0"))
GCC_14 = Compiler("cc", "c++", 14, ("14.1.0", "14.1.0"))
CLANG = Compiler("clang", "clang++", 0, ("Clang 16", "Clang 16"))


def _arguments(environ: dict[str, str], cpu: Processor = AMX, compiler: Compiler = GCC_12) -> str | None:
    return setup.build_environment(environ, cpu, compiler).get("CMAKE_ARGS")


def test_the_cure_is_given_where_the_bug_would_bite() -> None:
    assert _arguments({}) == "-DCMAKE_CXX_FLAGS='-fno-tree-dse -fno-dse'"
    assert _arguments({"CMAKE_ARGS": "-DGGML_BLAS=ON"}) == "-DGGML_BLAS=ON -DCMAKE_CXX_FLAGS='-fno-tree-dse -fno-dse'"
    assert _arguments({"CXXFLAGS": "-g"}) == "-DCMAKE_CXX_FLAGS='-g -fno-tree-dse -fno-dse'"


@pytest.mark.parametrize(("cpu", "compiler"), [(PLAIN, GCC_12), (AMX, GCC_14), (AMX, CLANG)])
def test_elsewhere_the_build_is_left_alone(cpu: Processor, compiler: Compiler) -> None:
    assert _arguments({}, cpu, compiler) is None
    assert _arguments({"CMAKE_ARGS": "-DX=1"}, cpu, compiler) == "-DX=1"


def test_flags_of_the_user_are_not_overridden() -> None:
    assert _arguments({"CMAKE_ARGS": "-DCMAKE_CXX_FLAGS=-O1"}) == "-DCMAKE_CXX_FLAGS=-O1"
    assert setup.build_environment({"CMAKE_BUILD_PARALLEL_LEVEL": "3"}, PLAIN, GCC_14)["CMAKE_BUILD_PARALLEL_LEVEL"] == "3"


def test_the_key_changes_with_everything_that_changes_the_code() -> None:
    keys = [
        setup.wheel_key("1.0", PLAIN, GCC_12, {}),
        setup.wheel_key("1.1", PLAIN, GCC_12, {}),
        setup.wheel_key("1.0", AMX, GCC_12, {}),
        setup.wheel_key("1.0", Processor("Other CPU", PLAIN.flags), GCC_12, {}),
        setup.wheel_key("1.0", PLAIN, GCC_14, {}),
        setup.wheel_key("1.0", PLAIN, CLANG, {}),
        *(setup.wheel_key("1.0", PLAIN, GCC_12, {name: "x"}) for name in setup.BUILD_VARIABLES),
    ]
    assert len(set(keys)) == len(keys)
    assert setup.wheel_key("1.0", PLAIN, GCC_12, {"HOME": "/x", "PATH": "/y"}) == keys[0]


def test_the_first_processor_is_read(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(
        "processor: 0\nmodel name\t: Example CPU\nflags\t\t: avx2 avx512f\n\nprocessor: 1\nmodel name: B\nflags: x\n"
    )
    assert setup.processor(cpuinfo) == PLAIN
    assert setup.processor(tmp_path / "missing").flags == frozenset()


def _fake_compiler(folder: Path, name: str, defines: str, status: int = 0) -> Path:
    script = folder / name
    script.write_text(f"#!/bin/sh\ncat <<'END'\n{defines}\nEND\nexit {status}\n")
    script.chmod(0o755)
    return script


def test_gcc_is_told_from_clang_which_claims_to_be_gcc_4(tmp_path: Path) -> None:
    gcc = _fake_compiler(tmp_path, "gcc", '#define __GNUC__ 12\n#define __VERSION__ "12.2.0"')
    clang = _fake_compiler(tmp_path, "clang", '#define __GNUC__ 4\n#define __clang__ 1\n#define __VERSION__ "Clang 16"')
    found = setup.find_compiler({"CC": str(gcc), "CXX": str(gcc)})
    assert found is not None
    assert (found.gcc_major, found.versions) == (12, ('"12.2.0"', '"12.2.0"'))
    found = setup.find_compiler({"CC": str(clang), "CXX": str(clang)})
    assert found is not None
    assert found.gcc_major == 0


def test_a_compiler_that_does_not_run_counts_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = _fake_compiler(tmp_path, "broken", "", status=1)
    assert setup.find_compiler({"CC": str(broken), "CXX": str(broken)}) is None
    assert setup.find_compiler({"CC": str(tmp_path / "missing")}) is None
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert setup.find_compiler({}) is None


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
def test_how_far_a_compilation_is_comes_from_its_output() -> None:
    setup.LOG.write_text("[ 12%] Building\n")
    assert setup._percent(0) == "12 %, "
    setup.LOG.write_text("  [3/250] Building\nsome text [99%]\n  [50/250] x\n")
    assert setup._percent(0) == "20 %, "
    setup.LOG.write_text("nothing\n")
    assert setup._percent(0) == ""


@pytest.mark.usefixtures("elsewhere")
def test_nothing_is_done_when_nothing_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[object] = []

    def install(_version: str, wanted: dict[str, object], _environ: object) -> None:
        installed.append(wanted)
        setup.STAMP.write_text(json.dumps(wanted))

    monkeypatch.setattr(setup, "install", install)
    setup.setup()
    setup.setup()
    assert len(installed) == 1
    monkeypatch.setattr(setup, "processor", lambda: AMX)
    setup.setup()
    assert len(installed) == 2
    for damaged in ("", "[]", '{"inputs": 1}'):
        setup.STAMP.write_text(damaged)
        setup.setup()
    assert len(installed) == 5


@pytest.mark.usefixtures("elsewhere")
def test_without_a_compiler_only_a_ready_environment_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "find_compiler", lambda _environ: None)
    with pytest.raises(setup.SetupError, match=r"apt install g\+\+"):
        setup.setup()
    monkeypatch.undo()


def _fake_pip(folder: Path) -> list[str]:
    """A program that takes pip's place: it notes how it was called, and ``wheel`` leaves a file."""
    script = folder / "pip.py"
    script.write_text(
        "import pathlib, sys\n"
        "words = sys.argv[1:]\n"
        "with open(pathlib.Path(__file__).with_name('calls'), 'a') as calls: calls.write(' '.join(words) + '\\n')\n"
        "if words[0] == 'wheel':\n"
        "    (pathlib.Path(words[words.index('--wheel-dir') + 1]) / 'built.whl').write_text('wheel')\n"
    )
    return [sys.executable, "-S", str(script)]


def test_the_library_is_compiled_once_and_never_from_pips_cache(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = _fake_pip(elsewhere)
    monkeypatch.setattr(setup, "pip", lambda *arguments: [*command, *arguments])
    monkeypatch.setattr(setup, "make_venv", lambda: None)
    setup.install("1.0", {"library": "key"}, os.environ)
    setup.install("1.0", {"library": "key"}, os.environ)
    calls = (elsewhere / "calls").read_text().splitlines()
    compiled = [call for call in calls if call.startswith("wheel")]
    assert len(compiled) == 1
    assert {"--no-cache-dir", "--no-deps", "--no-binary", "llama-cpp-python==1.0"} <= set(compiled[0].split())
    assert [path.name for path in (setup.CACHE / "wheels" / "key").iterdir()] == ["built.whl"]
    # the second time it was installed already
    assert len([call for call in calls if "--force-reinstall" in call]) == 1
    setup.install("1.0", {"library": "another"}, os.environ)
    calls = (elsewhere / "calls").read_text().splitlines()
    assert len([call for call in calls if "--force-reinstall" in call]) == 2


def test_a_build_that_fails_leaves_nothing_in_the_cache(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (elsewhere / "fail.py").write_text("import sys; sys.exit('wheel' in sys.argv)")
    monkeypatch.setattr(setup, "pip", lambda *arguments: [sys.executable, "-S", str(elsewhere / "fail.py"), *arguments])
    monkeypatch.setattr(setup, "make_venv", lambda: None)
    with pytest.raises(setup.SetupError, match="first line with 'error'"):
        setup.install("1.0", {"library": "key"}, os.environ)
    assert list((setup.CACHE / "wheels").iterdir()) == []
    assert not setup.STAMP.exists()


def test_the_versions_that_are_named_twice_agree() -> None:
    assert f"{setup.PACKAGE}=={setup.pinned(setup.PACKAGE)}" == PACKAGE
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert PACKAGE in project["dependencies"]


def test_everything_the_project_asks_for_is_pinned_and_no_index_is_named() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[\w.]+", line) for line in lines)
    pinned = {_normal(line.split("==")[0]) for line in lines}
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = [
        *pyproject["project"]["dependencies"],
        *pyproject["dependency-groups"]["dev"],
        *pyproject["build-system"]["requires"],
    ]
    names = {_normal(match[0]) for text in asked if (match := re.match(r"[\w.-]+", text))}
    assert names - pinned == set()


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _without_make() -> dict[str, str]:
    """The environment as it is outside ``make test``, which hands its own flags down."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}


@pytest.mark.parametrize("target", ["run", "test", "check", "bench", "format"])
def test_every_target_first_makes_the_environment_ready(target: str) -> None:
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True, env=_without_make())
    lines = done.stdout.splitlines()
    assert lines[0] == "python3 tools/setup.py"
    assert ".venv/bin/" in lines[1]


@pytest.mark.parametrize(
    ("arguments", "sent"),
    [
        (["PROMPT=it costs $5 & `echo no` \"quoted\" 'too'"], "it costs $5 & `echo no` \"quoted\" 'too'"),
        (["PROMPT=--help"], "--help"),
        ([], "What is the capital of France? Answer in one short sentence."),
    ],
)
def test_the_prompt_reaches_the_command_as_it_was_given(tmp_path: Path, arguments: list[str], sent: str) -> None:
    puna = tmp_path / "puna"
    puna.write_text('#!/bin/sh\nfor word; do printf "%s\\n" "$word"; done\n')
    puna.chmod(0o755)
    command = ["make", "-s", "run", f"BIN={tmp_path}", "PYTHON=true", *arguments]
    environ = {**_without_make(), "PROMPT": "%~ of some shell"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=environ, stdin=subprocess.DEVNULL)
    assert done.stdout.splitlines() == ["run", "smollm2:135m", "--", sent]
