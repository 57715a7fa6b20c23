from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from puna.native.kernels import build
from puna.native.kernels.library import kernels
from tests import needs

SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g1", "-O1")

# Options for a processor are compared, and left out, so that any processor's compiler does.
OLDER = """#!/bin/sh
for one in "$@"; do
  case $one in UNKNOWN) echo "unrecognized option $one" >&2; exit 1;; esac
  shift
  case $one in -m*) ;; *) set -- "$@" "$one";; esac
done
exec COMPILER "$@"
"""


@pytest.fixture
def never_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that a machine need not have, where another function stands in for what it compiles."""
    monkeypatch.setattr(build, "compiler", lambda: ["true"])


@pytest.mark.usefixtures("never_called")
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


def writes(target: Path, _command: list[str], *_others: object) -> None:
    """In the place of a compiler."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("compiled")


@pytest.mark.usefixtures("never_called")
@pytest.mark.parametrize("lack", ["no folder", "no home"])
def test_where_nothing_can_be_kept_the_library_is_compiled_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lack: str
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(build, "compile_library", writes)
    if lack == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", homeless)
        assert build.build(tmp_path / "library.so").read_text() == "compiled"
    else:
        assert build.build(tmp_path / "library.so", tmp_path / "file").read_text() == "compiled"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "library.so"]


def homeless() -> Path:
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.usefixtures("never_called")
def test_a_target_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(build, "compile_library", writes)
    with pytest.raises(build.BuildError, match="file"):
        build.build(tmp_path / "file" / "library.so", tmp_path / "cache")


@pytest.mark.usefixtures("never_called")
@pytest.mark.parametrize("kept", ["", "compi", "compilation"])
def test_what_is_kept_and_damaged_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: str) -> None:
    """A power failure may leave a name without what was written under it."""
    monkeypatch.setattr(build, "compile_library", writes)
    build.build(tmp_path / "library.so", tmp_path / "cache")
    next((tmp_path / "cache").glob(f"*/{build.LIBRARY.name}")).write_text(kept)
    assert build.build(tmp_path / "library.so", tmp_path / "cache").read_text() == "compiled"


@pytest.mark.usefixtures("never_called")
def test_options_and_processors_have_libraries_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[tuple[str, ...], str]] = []

    def compile_library(target: Path, command: list[str], options: tuple[str, ...], machine: str) -> None:
        compiled.append((options, machine))
        target.parent.mkdir(parents=True)
        target.write_text("compiled")

    monkeypatch.setattr(build, "compile_library", compile_library)
    wanted = [(options, machine) for options in ((), ("-g",)) for machine in ("x86_64", "aarch64")]
    libraries = {build.kept(build.compiler(), *one, cache=tmp_path) for one in [*wanted, *wanted]}
    assert compiled == wanted
    assert len(libraries) == len(wanted)
    assert all(library.exists() for library in libraries)


def unused(path: Path, days: float) -> Path:
    then = time.time() - days * build.DAY_S
    os.utime(path, (then, then), follow_symlinks=False)
    return path


@pytest.mark.usefixtures("never_called")
def test_libraries_that_nobody_uses_any_more_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When another is kept. What is not one of them stays, and so does what was used today."""
    monkeypatch.setattr(build, "compile_library", writes)
    used = build.kept(["true"], ("-used",), cache=tmp_path).parent
    folders = [tmp_path / f"{i:020x}" for i in range(40)]
    for days, folder in enumerate(folders):
        writes(folder / build.LIBRARY.name, [])
        unused(folder, days)
    mine = tmp_path / "my own folder"
    writes(mine / "file", [])
    unused(mine, 99)
    link = tmp_path / ("f" * 20)
    link.symlink_to(mine)
    unused(used, 99)
    unused(link, 99)
    assert build.kept(["true"], ("-used",), cache=tmp_path).parent == used
    assert all(folder.exists() for folder in folders)
    new = build.kept(["true"], ("-new",), cache=tmp_path).parent
    left = {path.name for path in tmp_path.iterdir()}
    assert left >= {used.name, new.name, mine.name, link.name}
    assert (mine / "file").exists()
    n_left = len(left & {folder.name for folder in folders})
    assert n_left >= 10
    assert n_left + 2 <= build.MOST_KEPT
    assert all(folder.exists() for folder in folders[:n_left])
    for folder in folders:
        writes(folder / build.LIBRARY.name, [])
        unused(folder, 0.5)
    build.kept(["true"], ("-newer",), cache=tmp_path)
    assert all(folder.exists() for folder in folders)


def test_what_killed_builds_have_left_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the next build: what is older than any build, and this user's."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    for name in ("puna-kernels-old", "puna-kernels-new", "of-others"):
        writes(tmp_path / "temporary" / name / "object.o", [])
    writes(tmp_path / "temporary" / "puna-kernels-file", [])
    (tmp_path / "temporary" / "puna-kernels-link").symlink_to(tmp_path / "temporary" / "of-others")
    for path in (tmp_path / "temporary").iterdir():
        if not path.name.endswith("new"):
            unused(path, 2)
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nfor one in "$@"; do [ "$last" = -o ] && : > "$one"; last=$one; done\n')
    compiler.chmod(0o755)
    with monkeypatch.context() as patched:
        patched.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
        build.compile_library(tmp_path / "library.so", [str(compiler)])
    assert (tmp_path / "temporary" / "puna-kernels-old").exists()
    build.compile_library(tmp_path / "library.so", [str(compiler)])
    left = sorted(path.name for path in (tmp_path / "temporary").iterdir())
    assert left == ["of-others", "puna-kernels-file", "puna-kernels-link", "puna-kernels-new"]
    assert (tmp_path / "temporary" / "of-others" / "object.o").exists()


def test_other_sources_are_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = needs.cxx_compiler()
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
    compiler = needs.cxx_compiler()
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
        build.compile_library(tmp_path / "library.so", compiler)
    assert not (tmp_path / "library.so").exists()


def test_the_compiler_of_the_environment_comes_first(tmp_path: Path) -> None:
    own = tmp_path / "own++"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    assert build.compiler({"CXX": f"{own} -v"}) == [str(own), "-v"]
    assert build.compiler({"CXX": "no-such-compiler"}) == build.compiler({})


def test_no_function_is_one_that_clang_lacks(tmp_path: Path) -> None:
    """It is one of the compilers that are looked for, and the only one of some systems."""
    includes = "".join(f'#include "{name}.h"\n' for name in ("turning", "between", "attention_kernel"))
    source = tmp_path / "vectors.cpp"
    source.write_text(includes)
    options = ("-std=c++17", "-fsyntax-only", "-D__builtin_shuffle=of_gcc_alone", f"-I{build.FOLDER}")
    done = subprocess.run(
        [*needs.cxx_compiler(), *options, str(source)], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr


def test_every_instruction_set_is_compiled() -> None:
    sets = ["portable", "avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx"]
    assert list(build.instruction_sets("x86_64")) == sets
    assert list(build.instruction_sets("aarch64")) == ["portable", "neon", "neon_dot", "neon_i8mm"]
    assert list(build.instruction_sets("riscv64")) == ["portable"]


def test_this_processor_s_are_among_them() -> None:
    needs.kernels()
    assert {*kernels().available()} <= {*build.instruction_sets()}


@pytest.mark.parametrize(
    ("unknown", "known"),
    [
        ("-mavxvnni|-mamx-tile", "avx512_bf16 avx512_vnni avx512 avx2 portable"),  # such as GCC 10
        ("-mavxvnni|-mamx-tile|-mavx512bf16", "avx512_vnni avx512 avx2 portable"),
        ("none", "amx avx512_bf16 avx512_vnni avx512 avx_vnni avx2 portable"),
    ],
)
def test_what_an_older_compiler_does_not_know_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unknown: str, known: str
) -> None:
    older = tmp_path / "older++"
    older.write_text(OLDER.replace("UNKNOWN", unknown).replace("COMPILER", " ".join(needs.cxx_compiler())))
    older.chmod(0o755)
    folder = tmp_path / "sources"
    folder.mkdir()
    for name in ("instructions.cpp", "attention_instructions.cpp"):
        (folder / name).write_text("")
    text = "#define TEXT(...) #__VA_ARGS__\n#define TEXT_OF(...) TEXT(__VA_ARGS__)\n"
    (folder / "nodes.cpp").write_text(f'{text}extern "C" const char* known() {{ return TEXT_OF(PUNA_KNOWN); }}\n')
    monkeypatch.setattr(build, "FOLDER", folder)
    monkeypatch.setattr(build, "OPTIONS", ("-fPIC",))
    build.compile_library(tmp_path / "library.so", [str(older)], ("-fPIC",), machine="x86_64")
    names = ctypes.CDLL(str(tmp_path / "library.so")).known
    names.restype = ctypes.c_char_p
    assert names().decode().replace("&", "").replace("_instructions,", " ").split() == known.split()


@pytest.fixture(scope="module")
def sanitized() -> Path:
    return build.kept(needs.cxx_compiler(), (*build.OPTIONS, *SANITIZED))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["every_product", "every_attention"])
def test_the_sanitizers_find_nothing(sanitized: Path, tmp_path: Path, name: str) -> None:
    """Memory and undefined behaviour, with every instruction set of this processor."""
    program = tmp_path / name
    source = Path(__file__).with_name(f"{name}.cpp")
    command = [
        *needs.cxx_compiler(),
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
    subprocess.run([*needs.cxx_compiler(), *options, str(source), "-o", str(program)], check=True, timeout=600)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_library_needs_nothing_of_python() -> None:
    needs.kernels()
    assert not hasattr(ctypes.CDLL(str(build.LIBRARY)), "PyInit_kernels")
