"""Have a model file quantised by another process, so that a crash of native code is an error and nothing more."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

from puna.environment import for_computing
from puna.errors import PunaError
from puna.store.disk import space

POLL_S = 0.1
_SHOWN_STDERR_CHARS = 300

OnBytes = Callable[[int, int], None]
"""Called several times a second with bytes done and in all; may raise to stop the work."""


def command_for(source: Path, target: Path, kind: str) -> list[str]:
    # -P: a folder named puna where the server happens to run is not this package.
    return [sys.executable, "-P", "-m", "puna.runner.process.quantise", str(source), str(target), kind]


def quantise(source: Path, folder: Path, kind: str, on_bytes: OnBytes) -> Path:
    """Write *source* in another kind into a temporary folder; returns the new file.

    Errors: DiskFull with the most that can be missing, since nobody knows the new size; PunaError with the reason; whatever
    *on_bytes* raises, after the process is gone.
    """
    target = folder / "quantised.gguf"
    output, errors = folder / "output", folder / "errors"
    with output.open("wb") as out, errors.open("wb") as err, output.open("rb") as lines:
        process = subprocess.Popen(
            command_for(source, target, kind), stdin=subprocess.PIPE, stdout=out, stderr=err, env=for_computing()
        )
        try:
            reason = _follow(process, lines, on_bytes)
        finally:
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
    if process.returncode != 0 or reason:
        reason = reason or _death(process.returncode, errors)
        if space.says_full(reason):
            written = target.stat().st_size if target.exists() else 0
            raise space.full(folder, max(1, source.stat().st_size - written))
        raise PunaError(f"the model could not be quantized: {reason}")
    return target


def _follow(process: subprocess.Popen[bytes], lines: IO[bytes], on_bytes: OnBytes) -> str:
    """Report until the process ends; returns the error that it reported."""
    done, total, reason, rest = 0, 0, "", b""
    is_over = False
    while not is_over:
        try:
            process.wait(POLL_S)
            is_over = True  # what it wrote before is still to be read
        except subprocess.TimeoutExpired:
            pass
        *whole, rest = (rest + lines.read()).split(b"\n")
        for line in whole:
            match _decoded(line):
                case {"done": int(done), "total": int(total)}:
                    pass
                case {"error": str(reason)}:
                    pass
        on_bytes(done, total)
    return reason


def _decoded(line: bytes) -> object:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _death(code: int, errors: Path) -> str:
    lines = [line.strip() for line in errors.read_text("utf-8", "replace").splitlines() if line.strip()]
    if code < 0:
        try:
            how = f"its process was ended by {signal.Signals(-code).name}"
        except ValueError:
            how = f"its process was ended by signal {-code}"
    else:
        how = f"its process ended with status {code}"
    telling = [line for line in lines if "GGML_ASSERT" in line or "Error" in line]
    return f"{how}: {telling[-1][:_SHOWN_STDERR_CHARS]}" if telling else how
