"""Compiling the tensor library for this processor, with a program in pip's place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from puna.native import build as building
from puna.native import providers
from puna.native.build import BuildError, Compiler
from puna.native.cpu import Model
from puna.native.providers import build_home, chosen
from tests.patience import PATIENCE_S

PLAIN = Model("Example CPU", frozenset({"avx2", "avx512f"}))
AMX = Model("Example CPU", frozenset({"avx2", "amx_tile", "amx_int8"}))
GCC_12 = Compiler("cc", "c++", 12, ("12.2.0", "12.2.0"))
GCC_14 = Compiler("cc", "c++", 14, ("14.1.0", "14.1.0"))
CLANG = Compiler("clang", "clang++", 0, ("Clang 16", "Clang 16"))


def _arguments(environ: dict[str, str], cpu: Model = AMX, compiler: Compiler = GCC_12) -> str:
    """Beside those that every build gets."""
    given, *rest = building.build_environment(environ, cpu, compiler)["CMAKE_ARGS"].split(" ", 1)
    assert given == "-DGGML_RPC=ON"
    return "".join(rest)


def test_devices_on_other_machines_are_part_of_it_unless_the_user_wants_otherwise() -> None:
    """Of two wishes CMake takes the last."""
    assert (
        building.build_environment({"CMAKE_ARGS": "-DGGML_RPC=OFF"}, PLAIN, GCC_14)["CMAKE_ARGS"]
        == "-DGGML_RPC=ON -DGGML_RPC=OFF"
    )


def test_the_cure_is_given_where_the_bug_would_bite() -> None:
    assert _arguments({}) == "-DCMAKE_CXX_FLAGS='-fno-tree-dse -fno-dse'"
    assert _arguments({"CMAKE_ARGS": "-DGGML_BLAS=ON"}) == "-DGGML_BLAS=ON -DCMAKE_CXX_FLAGS='-fno-tree-dse -fno-dse'"
    assert _arguments({"CXXFLAGS": "-g"}) == "-DCMAKE_CXX_FLAGS='-g -fno-tree-dse -fno-dse'"


@pytest.mark.parametrize(("cpu", "compiler"), [(PLAIN, GCC_12), (AMX, GCC_14), (AMX, CLANG)])
def test_elsewhere_the_build_is_left_alone(cpu: Model, compiler: Compiler) -> None:
    assert _arguments({}, cpu, compiler) == ""
    assert _arguments({"CMAKE_ARGS": "-DX=1"}, cpu, compiler) == "-DX=1"


def test_flags_of_the_user_are_not_overridden() -> None:
    assert _arguments({"CMAKE_ARGS": "-DCMAKE_CXX_FLAGS=-O1"}) == "-DCMAKE_CXX_FLAGS=-O1"
    assert building.build_environment({"CMAKE_BUILD_PARALLEL_LEVEL": "3"}, PLAIN, GCC_14)["CMAKE_BUILD_PARALLEL_LEVEL"] == "3"


def test_the_key_changes_with_everything_that_changes_the_code() -> None:
    keys = [
        building.build_key("1.0", PLAIN, GCC_12, {}),
        building.build_key("1.1", PLAIN, GCC_12, {}),
        building.build_key("1.0", AMX, GCC_12, {}),
        building.build_key("1.0", Model("Other CPU", PLAIN.flags), GCC_12, {}),
        building.build_key("1.0", PLAIN, GCC_14, {}),
        building.build_key("1.0", PLAIN, CLANG, {}),
        *(building.build_key("1.0", PLAIN, GCC_12, {name: "x"}) for name in building.BUILD_VARIABLES),
    ]
    assert len(set(keys)) == len(keys)
    assert building.build_key("1.0", PLAIN, GCC_12, {"HOME": "/x", "PATH": "/y"}) == keys[0]


def _fake_compiler(folder: Path, name: str, defines: str, status: int = 0) -> Path:
    script = folder / name
    script.write_text(f"#!/bin/sh\ncat <<'END'\n{defines}\nEND\nexit {status}\n")
    script.chmod(0o755)
    return script


def test_gcc_is_told_from_clang_which_claims_to_be_gcc_4(tmp_path: Path) -> None:
    gcc = _fake_compiler(tmp_path, "gcc", '#define __GNUC__ 12\n#define __VERSION__ "12.2.0"')
    clang = _fake_compiler(tmp_path, "clang", '#define __GNUC__ 4\n#define __clang__ 1\n#define __VERSION__ "Clang 16"')
    found = building.find_compiler({"CC": str(gcc), "CXX": str(gcc)})
    assert found is not None
    assert (found.gcc_major, found.versions) == (12, ('"12.2.0"', '"12.2.0"'))
    found = building.find_compiler({"CC": str(clang), "CXX": str(clang)})
    assert found is not None
    assert found.gcc_major == 0


def test_a_compiler_that_does_not_run_counts_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = _fake_compiler(tmp_path, "broken", "", status=1)
    assert building.find_compiler({"CC": str(broken), "CXX": str(broken)}) is None
    assert building.find_compiler({"CC": str(tmp_path / "missing")}) is None
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert building.find_compiler({}) is None


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a pip whose wheel holds a library that works by the trial's word; the file of its calls."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PUNA_LIBRARY", raising=False)
    monkeypatch.setattr(building, "find_compiler", lambda _environ=None: GCC_14)
    monkeypatch.setattr(building, "_try", lambda folder, say: say(f"tried {sorted(path.name for path in folder.iterdir())}"))
    site = tmp_path / "site" / "pip"
    site.mkdir(parents=True)
    (site / "__init__.py").write_text("")
    suffix = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
    names = [f"llama_cpp/lib/lib{name}{suffix}" for name in providers.NAMES] + ["llama_cpp/llama.py", "include/ggml.h"]
    (site / "__main__.py").write_text(
        "import json, os, sys, zipfile\n"
        f"open({str(tmp_path / 'calls')!r}, 'a').write(json.dumps([sys.argv[1:], os.environ.get('CMAKE_ARGS')]) + chr(10))\n"
        "print('[ 12%] Building'); print('[3/4] Building', flush=True)\n"
        "if 'wrong' in os.environ.get('CMAKE_ARGS', ''): sys.exit('error: wrong')\n"
        "folder = sys.argv[sys.argv.index('--wheel-dir') + 1]\n"
        f"with zipfile.ZipFile(folder + '/built.whl', 'w') as wheel:\n    for name in {names!r}: wheel.writestr(name, name)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    return tmp_path / "calls"


def arguments_of(calls: Path) -> list[list[str]]:
    return [json.loads(line)[0] for line in calls.read_text().splitlines()]


def test_what_was_compiled_is_tried_kept_and_used_from_then_on(calls: Path) -> None:
    said: list[str] = []
    folder = building.build(False, said.append)
    assert chosen().kind == "compiled"
    assert chosen().folder == folder / "lib"
    assert sorted(path.name for path in folder.iterdir()) == ["include", "lib"]
    assert "tried ['include', 'lib']" in said
    (arguments,) = arguments_of(calls)
    assert {"wheel", "--no-cache-dir", "--no-deps", "--no-binary", providers.SOURCE} <= set(arguments)
    assert "[ 12%]" in building.log_file().read_text()
    building.build(False, said.append)
    assert len(arguments_of(calls)) == 1
    building.build(True, said.append)
    assert len(arguments_of(calls)) == 2


def test_what_changes_the_code_is_compiled_apart_and_the_last_wish_counts(calls: Path) -> None:
    plain = building.build(False, print)
    other = building.build(False, print, {**os.environ, "CMAKE_ARGS": "-DGGML_CUDA=ON"})
    assert plain != other
    assert chosen().folder == other / "lib"
    building.build(False, print)
    assert chosen().folder == plain / "lib"
    assert len(arguments_of(calls)) == 2


def test_a_build_that_fails_shows_why_and_leaves_what_there_was(calls: Path) -> None:
    before = building.build(False, print)
    with pytest.raises(BuildError, match=r"(?s)error: wrong.*Compiling failed .*first line with 'error'"):
        building.build(False, print, {**os.environ, "CMAKE_ARGS": "wrong"})
    assert chosen().folder == before / "lib"
    assert [path for path in build_home().iterdir() if path.is_dir()] == [before]


def test_what_does_not_work_here_is_not_used(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_folder: Path, _say: building.Say) -> None:
        raise BuildError("it crashes")

    monkeypatch.setattr(building, "_try", refuse)
    with pytest.raises(BuildError, match="it crashes"):
        building.build(False, print)
    assert providers.compiled() is None


def test_without_a_compiler_the_error_says_how_to_get_one(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "find_compiler", lambda _environ=None: None)
    with pytest.raises(BuildError, match=r"apt install g\+\+"):
        building.build(False, print)


def test_a_damaged_wheel_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.whl").write_text("no archive")
    with pytest.raises(BuildError, match="--again"):
        building.unpack(tmp_path / "x.whl", tmp_path)


def test_a_wheel_writes_nothing_outside_its_folder(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as wheel:
        for name in ("llama_cpp/lib/../../../escaped", "include/../escaped", "/escaped", "llama_cpp/lib/libx.so"):
            wheel.writestr(name, "x")
    (tmp_path / "out").mkdir()
    building.unpack(tmp_path / "x.whl", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["libx.so", "x.whl"]


def test_those_who_ask_meanwhile_are_told_how_far_it_is(calls: Path) -> None:
    assert building.report() == {}
    build_home().mkdir(parents=True)
    (build_home() / "progress.json").write_text(json.dumps({"pid": os.getpid(), "begun": 1.0, "share": "37 %"}))
    assert building.report()["share"] == "37 %"
    # A process that was killed leaves its file behind.
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    ended.wait()
    (build_home() / "progress.json").write_text(json.dumps({"pid": ended.pid, "begun": 1.0, "share": "37 %"}))
    assert building.report() == {}


def test_how_far_a_compilation_is_comes_from_its_output(calls: Path) -> None:
    build_home().mkdir(parents=True)
    for text, share in (("[ 12%] Building\n", "12 %"), ("  [3/250] B\ntext [99%]\n  [50/250] x\n", "20 %"), ("nothing\n", "")):
        building.log_file().write_text(text)
        assert building._share() == share


def test_the_command_ends_with_the_reason_and_doctor_knows_it(calls: Path) -> None:
    environ = {**os.environ, "PATH": str(calls.parent / "empty"), "CC": "", "CXX": ""}
    done = subprocess.run(
        [sys.executable, "-m", "puna.native.build"], env=environ, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert done.returncode == 1
    assert "no C++ compiler was found" in done.stderr
    assert "no C++ compiler was found" in building.report()["failed"]
