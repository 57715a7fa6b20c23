"""Compile the tensor library for this very processor: ``python -m puna.native.build``, which ``puna native build`` runs.

llama-cpp-python is compiled by pip, tried in a process of its own, and kept in the user's cache under a key of everything it
depends on; the next start uses it (puna.native.providers). pip's own cache knows only the package's version, and would
hand a wheel with another processor's instructions to this one.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import filelock
import psutil

from puna.native import cache, cpu
from puna.native.providers import BUILD, SOURCE, build_home

# Environment variables that change what the build produces.
BUILD_VARIABLES = ("CC", "CXX", "CMAKE_ARGS", "CMAKE_BUILD_TYPE", "CFLAGS", "CXXFLAGS", "LDFLAGS", "SKBUILD_CMAKE_DEFINE")
# GCC before 14 believes that a tile configuration has 8 bytes instead of 64 and drops the stores of the rest.
AMX_CURE = "-fno-tree-dse -fno-dse"
GCC_WITHOUT_AMX_BUG = 14
TAIL_LINES = 30
REPORT_EVERY_S = 15.0
# What the library has only where it is asked for: devices on other machines, for a few seconds and 240 KiB.
PARTS = ("-DGGML_RPC=ON",)
TRIAL_TIMEOUT_S = 300.0
NO_COMPILER = f"""no C++ compiler was found. Install one and run `{BUILD}` again:
  Debian, Ubuntu:  sudo apt install g++ make
  Fedora:          sudo dnf install gcc-c++ make
  Arch:            sudo pacman -S gcc make
  macOS:           xcode-select --install"""

Say = Callable[[str], None]


class BuildError(Exception):
    """Ends the build; the text is for the person at the terminal."""


class Compiler(NamedTuple):
    c: str
    cxx: str
    gcc_major: int  # 0 for other compilers
    versions: tuple[str, ...]


def _macros(command: str, language: str) -> dict[str, str]:
    """What a compiler predefines; empty when it cannot be run."""
    try:
        done = subprocess.run(
            [*shlex.split(command), "-dM", "-E", "-x", language, os.devnull],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
            timeout=60,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return {}
    return dict(re.findall(r"^#define (\w+) (.*)$", done.stdout, re.MULTILINE)) if done.returncode == 0 else {}


def find_compiler(environ: Mapping[str, str] = os.environ) -> Compiler | None:
    """The compilers that CMake will use, or None when there is no working pair."""
    found = []
    for variable, names, language in (("CC", ("cc", "gcc", "clang"), "c"), ("CXX", ("c++", "g++", "clang++"), "c++")):
        command = environ.get(variable) or next((name for name in names if shutil.which(name)), "")
        macros = _macros(command, language) if command else {}
        if not macros:
            return None
        found.append((command, macros))
    (c, c_macros), (cxx, cxx_macros) = found
    is_gcc = "__GNUC__" in cxx_macros and "__clang__" not in cxx_macros
    versions = tuple(macros.get("__VERSION__", "") for macros in (c_macros, cxx_macros))
    return Compiler(c, cxx, int(cxx_macros["__GNUC__"]) if is_gcc else 0, versions)


def build_environment(environ: Mapping[str, str], processor: cpu.Model, compiler: Compiler) -> dict[str, str]:
    """The environment to compile in: the user's, with PARTS, and the cure for GCC's AMX bug where it would bite."""
    changed = dict(environ)
    changed.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(_parallel_jobs()))  # make, unlike ninja, runs one job if not told
    arguments = " ".join([*PARTS, environ.get("CMAKE_ARGS", "")]).strip()  # of two wishes CMake takes the last, the user's
    changed["CMAKE_ARGS"] = arguments
    has_bug = "amx_tile" in processor.flags and 0 < compiler.gcc_major < GCC_WITHOUT_AMX_BUG
    if has_bug and "CMAKE_CXX_FLAGS" not in arguments:
        # CMake reads CXXFLAGS only while CMAKE_CXX_FLAGS is not given.
        flags = f"{environ.get('CXXFLAGS', '')} {AMX_CURE}".strip()
        changed["CMAKE_ARGS"] = f"{arguments} -DCMAKE_CXX_FLAGS='{flags}'".strip()
    return changed


def _parallel_jobs() -> int:
    n_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30
    except (ValueError, OSError, AttributeError):
        return n_cpus
    return max(1, min(n_cpus, gib))  # one compiler process takes up to about 1 GiB


def build_key(version: str, processor: cpu.Model, compiler: Compiler, environ: Mapping[str, str]) -> str:
    """A name for what the build will produce: the same key, the same machine code."""
    return _digest(
        [
            version,
            processor.key,
            compiler.c,
            compiler.cxx,
            *compiler.versions,
            *(f"{name}={environ.get(name, '')}" for name in BUILD_VARIABLES),
            sys.platform,
            platform.machine(),
            *platform.libc_ver(),
            f"py{sys.version_info.major}",
        ]
    )


def _digest(parts: list[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


class Progress(NamedTuple):
    """What a build that is under way tells those who ask: ``puna doctor``."""

    pid: int
    begun: float  # seconds since the epoch
    share: str  # "37 %", or nothing while that is unknown


def under_way() -> Progress | None:
    try:
        found = Progress(**json.loads(_progress_file().read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return found if psutil.pid_exists(found.pid) else None


def _progress_file() -> Path:
    return build_home() / "progress.json"


def log_file() -> Path:
    """What the compiler says, and after it what the build said last."""
    return build_home() / "build.log"


def build(again: bool, say: Say, environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of the library compiled with this environment, which is used from now on.

    Errors: BuildError.
    """
    compiler = find_compiler(environ)
    if compiler is None:
        raise BuildError(NO_COMPILER)
    changed = build_environment(environ, cpu.model(), compiler)
    key = build_key(SOURCE.partition("==")[2], cpu.model(), compiler, changed)
    home = build_home()
    home.mkdir(parents=True, exist_ok=True)
    _failure_file().unlink(missing_ok=True)
    with _alone(home, say):
        folder = home / key
        if again or not (folder / "lib").is_dir():
            with tempfile.TemporaryDirectory(dir=home, prefix=".building-") as scratch:
                wheel = _wheel(key, again, changed, say)
                unpack(wheel, Path(scratch))
                _try(Path(scratch), say)
                shutil.rmtree(folder, ignore_errors=True)
                shutil.copytree(scratch, folder)
        choose(home, key)
    return folder


def choose(home: Path, key: str) -> None:
    scratch = home / f".chosen-{os.getpid()}"
    scratch.write_text(key + "\n", "utf-8")
    scratch.replace(home / "chosen")


@contextlib.contextmanager
def _alone(home: Path, say: Say) -> Iterator[None]:
    """Two builds at once would compile the same twice."""
    lock = filelock.FileLock(home / "build.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        say("Waiting for another build to finish…")
        lock.acquire()
    try:
        yield
    finally:
        _progress_file().unlink(missing_ok=True)
        lock.release()


def _wheel(key: str, again: bool, environ: Mapping[str, str], say: Say) -> Path:
    """As pip made it, from the cache or made now; moved there in one step, so that a cached one is always whole."""
    folder = cache.home() / "wheels" / key
    if not again and (kept := _wheel_in(folder)):
        return kept
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".building-") as scratch:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
        command = [*pip, "wheel", "-v", "--no-deps", "--no-cache-dir", "--no-binary", SOURCE.partition("==")[0]]
        command += [*_constraints(), "--wheel-dir", scratch, SOURCE]
        _run(command, environ, say)
        built = _wheel_in(Path(scratch))
        if built is None:
            raise BuildError(f"pip built no wheel of {SOURCE}; its output is in {log_file()}")
        return built.replace(folder / built.name)


def _wheel_in(folder: Path) -> Path | None:
    return next(iter(sorted(folder.glob("*.whl"))), None)


def _constraints() -> list[str]:
    """The versions of what builds it, in a checkout: an installed package has no file of them."""
    file = Path(__file__).resolve().parents[3] / "constraints.txt"
    return ["--build-constraint", str(file)] if file.is_file() else []


def unpack(wheel: Path, folder: Path) -> None:
    """The libraries of a wheel into ``lib``, the headers into ``include``, and nothing else.

    Errors: BuildError when it is damaged.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                path = PurePosixPath(member.filename)
                inside = {("llama_cpp", "lib"): "lib", ("include",): "include"}.get(path.parts[:-1])
                if inside and not member.is_dir():
                    (folder / inside).mkdir(exist_ok=True)
                    (folder / inside / path.name).write_bytes(archive.read(member))
    except (OSError, zipfile.BadZipFile) as error:
        raise BuildError(f"{wheel} cannot be unpacked ({error}): run `{BUILD} --again`") from error


def _try(folder: Path, say: Say) -> None:
    """Errors: BuildError when what was compiled does not work here."""
    say("Trying it…")
    environ = {**os.environ, "PUNA_LIBRARY": str(folder), "XDG_CACHE_HOME": str(folder / "trial")}
    command = [sys.executable, "-m", "puna.native.report"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=TRIAL_TIMEOUT_S)
    shutil.rmtree(folder / "trial", ignore_errors=True)
    if done.returncode != 0:
        lines = [line for line in done.stdout.splitlines() if "broken" in line or line.startswith("error")]
        raise BuildError("\n".join(["what was compiled does not work here, and is not used:", *lines]))


def _run(command: list[str], environ: Mapping[str, str], say: Say) -> None:
    """Run a command with its output in the log file, telling how far it is."""
    started, reported = time.time(), 0.0
    with log_file().open("wb") as log:
        log.write(f"$ {shlex.join(command)}\n".encode())
        log.flush()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environ)
    say("Compiling the tensor library for this CPU, about 4 minutes, once…")
    try:
        while (status := _wait(process)) is None:
            elapsed, share = time.time() - started, _share()
            _progress_file().write_text(json.dumps(Progress(os.getpid(), started, share)._asdict()), "utf-8")
            if elapsed - reported >= REPORT_EVERY_S:
                reported = elapsed
                say(f"  {share + ', ' if share else ''}{elapsed:.0f} s")
    except BaseException:
        process.kill()
        process.wait()
        raise
    if status != 0:
        shown = _log_text().splitlines()[-TAIL_LINES:]
        where = f"The whole output is in {log_file()}. Look there for the first line with 'error'."
        raise BuildError("\n".join([*shown, "", f"Compiling failed (exit status {status}).", where]))
    say(f"Compiled after {time.time() - started:.0f} s.")


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(timeout=1.0)
    except subprocess.TimeoutExpired:
        return None


def _log_text() -> str:
    return log_file().read_text("utf-8", "replace")


def _share() -> str:
    """How far a compilation is, as make (``[ 12%]``) or ninja (``[3/250]``) prints it."""
    found = re.findall(r"^\s*\[\s*(?:(\d+)%|(\d+)/(\d+))\]", _log_text(), re.MULTILINE)
    if not found:
        return ""
    percent, done, total = found[-1]
    return f"{percent or 100 * int(done) // max(1, int(total))} %"


def _failure_file() -> Path:
    return build_home() / "failure.txt"


def report() -> dict[str, Any]:
    """Of a build that is under way how far it is, and why the last one failed, for the self-test's report."""
    if progress := under_way():
        return {"share": progress.share, "seconds": round(time.time() - progress.begun)}
    try:
        return {"failed": _failure_file().read_text("utf-8").strip()}
    except OSError:
        return {}


def main() -> int:
    parser = argparse.ArgumentParser(prog=BUILD, description=__doc__)
    parser.add_argument("--again", action="store_true", help="compile even if that was done before")
    arguments = parser.parse_args()
    if hasattr(os, "nice"):
        os.nice(5)  # a server that answers goes first
    try:
        folder = build(arguments.again, lambda text: print(text, flush=True))
    except BuildError as error:
        build_home().mkdir(parents=True, exist_ok=True)
        _failure_file().write_text(f"{error}\n", "utf-8")
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    print(f"{SOURCE} for this CPU is in {folder}. It is used from the next start on; `puna doctor` shows it.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
