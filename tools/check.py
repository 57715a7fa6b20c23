"""What a change must satisfy beside its tests: format, lint, types and imports, all at once, in `make check`.

What each found is shown when it ends. mypy keeps what it knows between runs; its worker processes are not used, since they do
not always find each other on a busy machine.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = Path(sys.executable).parent
CHECKS: Mapping[str, Sequence[str]] = {
    "format": ("ruff", "format", "--check", "."),
    "lint": ("ruff", "check", "."),
    "types": ("mypy",),
    "imports": ("lint-imports",),
}


class Outcome(NamedTuple):
    name: str
    status: int
    output: str
    seconds: float


def outcome(name: str, command: Sequence[str]) -> Outcome:
    started = time.monotonic()
    words = [str(PROGRAMS / command[0]), *command[1:]]
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return Outcome(name, done.returncode, done.stdout, time.monotonic() - started)


def main(checks: Mapping[str, Sequence[str]] = CHECKS) -> int:
    """The number of those that found something."""
    n_failed = 0
    with ThreadPoolExecutor(len(checks)) as pool:
        for future in as_completed([pool.submit(outcome, name, command) for name, command in checks.items()]):
            done = future.result()
            n_failed += done.status != 0
            print(f"{done.name:8} {'clean' if done.status == 0 else 'FAILED'}, {done.seconds:.1f} s", flush=True)
            if done.status != 0:
                print(done.output, flush=True)
    return n_failed


if __name__ == "__main__":
    sys.exit(main())
