"""Make .venv ready to run, test and develop Puna; needs Python >= 3.11 with venv and, the first time, a C++ compiler.

The tensor library (llama-cpp-python) is compiled for this very processor. That takes minutes, so the wheel is kept in a
cache under a key of everything it depends on; pip's own cache knows only the package's version, and would hand a wheel
with another processor's instructions to this one. Uses the standard library only, and does nothing when nothing changed.
"""

from __future__ import annotations

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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
STAMP = VENV / ".ready"
LOG = VENV / "setup.log"
CONSTRAINTS = ROOT / "constraints.txt"
KERNELS = ROOT / "src" / "puna" / "native" / "kernels"  # compiled by the package's own build
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "puna"

PACKAGE = "llama-cpp-python"
LOWEST_PYTHON = (3, 11)
# Environment variables that change what the build produces.
BUILD_VARIABLES = ("CC", "CXX", "CMAKE_ARGS", "CMAKE_BUILD_TYPE", "CFLAGS", "CXXFLAGS", "LDFLAGS", "SKBUILD_CMAKE_DEFINE")
# GCC before 14 believes that a tile configuration has 8 bytes instead of 64 and drops the stores of the rest.
AMX_CURE = "-fno-tree-dse -fno-dse"
GCC_WITHOUT_AMX_BUG = 14
TAIL_LINES = 30
REPORT_EVERY_S = 30.0
NO_COMPILER = """no C++ compiler was found, and the tensor library has to be compiled once for this processor.
Install one and run the same command again:
  Debian, Ubuntu:  sudo apt install g++ make cmake
  Fedora:          sudo dnf install gcc-c++ make cmake
  Arch:            sudo pacman -S gcc make cmake
  macOS:           xcode-select --install"""


class SetupError(Exception):
    """Ends the setup; the text is for the person at the terminal."""


class Processor(NamedTuple):
    model: str
    flags: frozenset[str]

    @property
    def key(self) -> str:
        return digest([self.model, *sorted(self.flags)])


class Compiler(NamedTuple):
    c: str
    cxx: str
    gcc_major: int  # 0 for other compilers
    versions: tuple[str, ...]


def digest(parts: list[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> Processor:
    """The processor that code is compiled for; where the system does not list its flags, only its name."""
    try:
        text = cpuinfo.read_text(errors="replace")
    except OSError:
        return Processor(f"{platform.machine()} {platform.processor()}", frozenset())
    fields: dict[str, str] = {}
    for line in text.split("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    flags = fields.get("flags") or fields.get("Features") or ""
    return Processor(fields.get("model name") or platform.machine(), frozenset(flags.split()))


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


def find_compiler(environ: Mapping[str, str]) -> Compiler | None:
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


def build_environment(environ: Mapping[str, str], cpu: Processor, compiler: Compiler) -> dict[str, str]:
    """The environment to compile in: the user's, with the cure for GCC's AMX bug where it would bite."""
    changed = dict(environ)
    changed.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(_parallel_jobs()))  # make, unlike ninja, runs one job if not told
    arguments = environ.get("CMAKE_ARGS", "")
    has_bug = "amx_tile" in cpu.flags and 0 < compiler.gcc_major < GCC_WITHOUT_AMX_BUG
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


def wheel_key(version: str, cpu: Processor, compiler: Compiler, environ: Mapping[str, str]) -> str:
    """A name for what the build will produce: the same key, the same machine code."""
    return digest(
        [
            version,
            cpu.key,
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


def pinned(package: str) -> str:
    """The version that constraints.txt names."""
    match = re.search(rf"^{re.escape(package)}==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE)
    if not match:
        raise SetupError(f"constraints.txt does not pin {package}")
    return match.group(1)


def run(command: list[str], what: str, environ: Mapping[str, str], *, next_step: str) -> None:
    """Run a command with its output in the log file, showing *what* and the seconds it takes.

    Errors: SetupError with the end of the output and *next_step* when the command fails.
    """
    log_begin = LOG.stat().st_size if LOG.exists() else 0
    started = time.monotonic()
    is_terminal = sys.stdout.isatty()
    reported = 0.0
    with LOG.open("ab") as log:
        log.write(f"$ {shlex.join(command)}\n".encode())
        log.flush()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environ, cwd=ROOT)
    print(what, end="" if is_terminal else "\n", flush=True)
    try:
        while (status := _wait(process)) is None:
            elapsed = time.monotonic() - started
            if is_terminal:
                print(f"\r{what} {_percent(log_begin)}{elapsed:.0f} s ", end="", flush=True)
            elif elapsed - reported >= REPORT_EVERY_S:
                reported = elapsed
                print(f"  {_percent(log_begin)}{elapsed:.0f} s", flush=True)
    except BaseException:
        process.kill()
        process.wait()
        raise
    elapsed = time.monotonic() - started
    if is_terminal:
        print(f"\r{what} {'done' if status == 0 else 'failed'} after {elapsed:.0f} s" + " " * 8, flush=True)
    if status != 0:
        shown = _log_text(log_begin).splitlines()[-TAIL_LINES:]
        raise SetupError("\n".join([*shown, "", f"{what} failed (exit status {status}).", next_step]))


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(timeout=1.0)
    except subprocess.TimeoutExpired:
        return None


def _log_text(begin: int) -> str:
    with LOG.open("rb") as log:
        log.seek(begin)
        return log.read().decode(errors="replace")


def _percent(log_begin: int) -> str:
    """How far a compilation is, as make (``[ 12%]``) or ninja (``[3/250]``) prints it."""
    found = re.findall(r"^\s*\[\s*(?:(\d+)%|(\d+)/(\d+))\]", _log_text(log_begin), re.MULTILINE)
    if not found:
        return ""
    percent, done, total = found[-1]
    return f"{percent or 100 * int(done) // max(1, int(total))} %, "


def make_venv() -> None:
    try:
        works = subprocess.run([PYTHON, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0
    except OSError:
        works = False
    if works:
        return
    print(f"Creating {VENV.name}", flush=True)
    done = subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SetupError(
            f"{(done.stdout + done.stderr).strip()}\n\npython3 -m venv failed.\n"
            "On Debian and Ubuntu the package python3-venv is needed: sudo apt install python3-venv"
        )


def pip(*arguments: str) -> list[str]:
    return [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]


def cached_wheel(folder: Path) -> Path | None:
    return next(iter(sorted(folder.glob("*.whl"))), None)


def build_wheel(version: str, folder: Path, environ: Mapping[str, str]) -> Path:
    """Compile the tensor library and move the wheel into the cache in one step, so that a cached one is always whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".building-") as scratch:
        command = pip("wheel", "-v", "--no-deps", "--no-cache-dir", "--no-binary", PACKAGE)
        command += ["--build-constraint", str(CONSTRAINTS), "--wheel-dir", scratch, f"{PACKAGE}=={version}"]
        run(
            command,
            "Compiling the tensor library for this CPU, about 4 minutes, once…",
            environ,
            next_step=f"The whole output is in {LOG}. Look there for the first line with 'error'.",
        )
        built = cached_wheel(Path(scratch))
        if built is None:
            raise SetupError(f"pip built no wheel of {PACKAGE}; its output is in {LOG}")
        wheel = folder / built.name
        folder.mkdir(exist_ok=True)
        built.replace(wheel)
        return wheel


def stamp() -> dict[str, Any]:
    try:
        found = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Two setups at once would compile the same library twice and mix their files in one environment."""
    if os.name != "posix":
        yield
        return
    import fcntl

    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "setup.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print("Waiting for another setup to finish…", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build_inputs() -> list[Path]:
    """Files that call for another installation when they change."""
    kernels = sorted([*KERNELS.glob("*.cpp"), *KERNELS.glob("*.h"), KERNELS / "build.py"])
    return [ROOT / "pyproject.toml", ROOT / "setup.py", CONSTRAINTS, Path(__file__), *kernels]


def setup() -> None:
    cpu = processor()
    compiler = find_compiler(os.environ)
    inputs = digest([path.read_text() for path in build_inputs()])
    wanted: dict[str, Any] = {"inputs": inputs, "cpu": cpu.key}
    environ: Mapping[str, str] = os.environ
    version = pinned(PACKAGE)
    if compiler is not None:
        environ = build_environment(os.environ, cpu, compiler)
        wanted["library"] = wheel_key(version, cpu, compiler, environ)
    if wanted.items() <= stamp().items() and PYTHON.exists():
        return
    if compiler is None:
        raise SetupError(NO_COMPILER)
    with one_at_a_time():
        install(version, wanted, environ)


def install(version: str, wanted: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    make_venv()
    LOG.write_bytes(b"")
    installed = stamp().get("library")
    STAMP.unlink(missing_ok=True)
    offline = f"The whole output is in {LOG}. Is the package index reachable? Running the same command again continues."
    constrained = ("install", "-c", str(CONSTRAINTS))
    run(pip(*constrained, "--upgrade", "pip"), "Updating pip…", os.environ, next_step=offline)
    folder = CACHE / "wheels" / str(wanted["library"])
    wheel = cached_wheel(folder) or build_wheel(version, folder, environ)
    if installed != wanted["library"]:
        command = pip("install", "--no-deps", "--no-index", "--force-reinstall", str(wheel))
        run(command, "Installing the tensor library…", os.environ, next_step=f"If the wheel is damaged, remove {wheel}.")
    command = pip(*constrained, "--build-constraint", str(CONSTRAINTS), "--editable", ".", "--group", "dev")
    run(command, "Installing Puna, its dependencies and its matrix products, up to a minute…", os.environ, next_step=offline)
    STAMP.write_text(json.dumps(wanted))


def rerun_with_newer_python() -> None:
    """Where ``python3`` is too old, a newer one often stands beside it under its full name."""
    for minor in range(19, LOWEST_PYTHON[1] - 1, -1):
        newer = shutil.which(f"python3.{minor}")
        if newer:
            os.execv(newer, [newer, *sys.argv])
    found = platform.python_version()
    raise SetupError(f"Puna needs Python 3.11 or newer, and python3 is {found}. Name one: make PYTHON=/path/to/python3.11")


def main() -> int:
    try:
        if sys.version_info[:2] < LOWEST_PYTHON:
            rerun_with_newer_python()
        setup()
    except SetupError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
