from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from puna.native.kernels import build
from tests.unit.native.kernels.test_library import AVAILABLE

SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g1", "-O1")


def test_the_library_is_compiled_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Path] = []

    def compile_library(target: Path, command: list[str], options: tuple[str, ...], machine: str) -> None:
        calls.append(target)
        target.parent.mkdir(parents=True)
        target.write_text("compiled")

    monkeypatch.setattr(build, "compile_library", compile_library)
    for name in ("first.so", "second.so"):
        assert build.build(tmp_path / "package" / name, tmp_path / "cache").read_text() == "compiled"
    assert len(calls) == 1
    assert calls[0].parent.parent == tmp_path / "cache"
    monkeypatch.setattr(build, "OPTIONS", (*build.OPTIONS, "-DOTHER"))
    build.build(tmp_path / "package" / "third.so", tmp_path / "cache")
    assert len(calls) == 2


def test_options_and_processors_have_libraries_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[tuple[str, ...], str]] = []

    def compile_library(target: Path, command: list[str], options: tuple[str, ...], machine: str) -> None:
        compiled.append((options, machine))
        target.parent.mkdir(parents=True)
        target.touch()

    monkeypatch.setattr(build, "compile_library", compile_library)
    wanted = [(options, machine) for options in ((), ("-g",)) for machine in ("x86_64", "aarch64")]
    libraries = {build.kept(build.compiler(), *one, cache=tmp_path) for one in [*wanted, *wanted]}
    assert compiled == wanted
    assert len(libraries) == len(wanted)
    assert all(library.exists() for library in libraries)


def test_other_sources_are_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = build.compiler()
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    (tmp_path / "nodes.cpp").write_text("int a;")
    first = build.key(command, ())
    (tmp_path / "nodes.cpp").write_text("int b;")
    assert build.key(command, ()) != first


def test_no_compiler_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "compiler", list)
    with pytest.raises(build.BuildError, match="no C\\+\\+ compiler"):
        build.build(tmp_path / "library.so", tmp_path)


def test_the_compiler_s_words_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    for name in (
        "instructions.cpp",
        "attention_instructions.cpp",
        "packing.cpp",
        "nodes.cpp",
        "attention_nodes.cpp",
        "self_check.cpp",
    ):
        (tmp_path / name).write_text("#error of the test\n")
    with pytest.raises(build.BuildError, match="of the test"):
        build.compile_library(tmp_path / "library.so", build.compiler())
    assert not (tmp_path / "library.so").exists()


def test_the_compiler_of_the_environment_comes_first(tmp_path: Path) -> None:
    own = tmp_path / "own++"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    assert build.compiler({"CXX": f"{own} -v"}) == [str(own), "-v"]
    assert build.compiler({"CXX": "no-such-compiler"}) == build.compiler({})


def test_every_instruction_set_is_compiled() -> None:
    sets = ["portable", "avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx"]
    assert list(build.instruction_sets("x86_64")) == sets
    assert list(build.instruction_sets("aarch64")) == ["portable", "neon", "neon_dot", "neon_i8mm"]
    assert list(build.instruction_sets("riscv64")) == ["portable"]
    assert {*AVAILABLE} <= {*build.instruction_sets()}


@pytest.fixture(scope="module")
def sanitized() -> Path:
    return build.kept(build.compiler(), (*build.OPTIONS, *SANITIZED))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["every_product", "every_attention"])
def test_the_sanitizers_find_nothing(sanitized: Path, tmp_path: Path, name: str) -> None:
    """Memory and undefined behaviour, with every instruction set of this processor."""
    program = tmp_path / name
    source = Path(__file__).with_name(f"{name}.cpp")
    command = [
        *build.compiler(),
        *build.OPTIONS,
        *SANITIZED,
        "-pthread",
        f"-I{build.FOLDER}",
        str(source),
        str(sanitized),
        "-o",
        str(program),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    environ = {"LD_LIBRARY_PATH": str(sanitized.parent), "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=600, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_piece_of_work_is_done_once(tmp_path: Path) -> None:
    program, source = tmp_path / "every_piece", Path(__file__).with_name("every_piece.cpp")
    options = ("-std=c++17", "-O1", "-g1", "-fsanitize=thread", "-pthread", f"-I{build.FOLDER}")
    subprocess.run([*build.compiler(), *options, str(source), "-o", str(program)], check=True, capture_output=True, timeout=600)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_library_needs_nothing_of_python() -> None:
    assert not hasattr(ctypes.CDLL(str(build.LIBRARY)), "PyInit_kernels")
