"""Make .venv ready to run Puna, or with ``--dev`` to test and develop it; needs Python >= 3.11 with venv, and no compiler.

The tensor library comes prebuilt. Puna's own matrix products are compiled by the package's build where there is a compiler.
Uses the standard library only, and does nothing when nothing changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
STAMP = VENV / ".ready"
LOG = VENV / "setup.log"
CONSTRAINTS = ROOT / "constraints.txt"
KERNELS = ROOT / "src" / "puna" / "native" / "kernels"  # compiled by the package's own build
WEB = ROOT / "src" / "puna" / "web"  # what its page takes from others is fetched by the build, where there is npm
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "puna"

LOWEST_PYTHON = (3, 11)
TAIL_LINES = 30
REPORT_EVERY_S = 30.0


class SetupError(Exception):
    """Ends the setup; the text is for the person at the terminal."""


def digest(parts: list[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def has_compiler(environ: Mapping[str, str] = os.environ) -> bool:
    """As the package's build looks for one (puna.native.kernels.build); it decides there whether that one works."""
    wanted = shlex.split(environ.get("CXX", ""))[:1]
    return any(shutil.which(name) for name in (*wanted, "c++", "g++", "clang++"))


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
                print(f"\r{what} {elapsed:.0f} s ", end="", flush=True)
            elif elapsed - reported >= REPORT_EVERY_S:
                reported = elapsed
                print(f"  {elapsed:.0f} s", flush=True)
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
    web = [WEB / "libraries.py", WEB / "package-lock.json"]
    return [ROOT / "pyproject.toml", ROOT / "setup.py", CONSTRAINTS, Path(__file__), *kernels, *web]


def setup(*, is_dev: bool) -> None:
    inputs = digest([path.read_text() for path in build_inputs()])
    wanted: dict[str, Any] = {"inputs": inputs, "machine": platform.machine(), "compiler": has_compiler()}
    found = stamp()
    if wanted.items() <= found.items() and PYTHON.exists() and (found.get("dev") or not is_dev):
        return
    with one_at_a_time():
        install({**wanted, "dev": is_dev or bool(found.get("dev"))})


def install(wanted: Mapping[str, Any]) -> None:
    make_venv()
    LOG.write_bytes(b"")
    STAMP.unlink(missing_ok=True)
    constrained = ("install", "-c", str(CONSTRAINTS))
    offline = f"The whole output is in {LOG}. Is the package index reachable? Running the same command again continues."
    # The one that Python brings may be too old for constraints of builds.
    run(pip(*constrained, "--upgrade", "pip"), "Updating pip…", os.environ, next_step=offline)
    # Python compiles what it imports; all of the packages at once would take as long as everything else here.
    command = pip(*constrained, "--no-compile", "--build-constraint", str(CONSTRAINTS), "--editable", ".")
    if wanted["dev"]:
        command += ["--group", "dev"]
    own = " and compiling its matrix products" if wanted["compiler"] else ""
    run(command, f"Installing Puna and what it needs{own}, up to a minute…", os.environ, next_step=offline)
    if wanted["dev"]:
        fetch_libraries()
    STAMP.write_text(json.dumps(wanted))


def fetch_libraries() -> None:
    """With the npm that was just installed; the build may have found none. The page works without them."""
    try:
        run([str(PYTHON), str(WEB / "libraries.py")], "Fetching the page's libraries…", os.environ, next_step="")
    except SetupError as error:
        print(f"{error}\nThe page will show answers as plain text.", file=sys.stderr)


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
        setup(is_dev="--dev" in sys.argv[1:])
    except SetupError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
