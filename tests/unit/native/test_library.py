"""Opening the tensor library: what it is told through the environment, since it can be told in no other way."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from puna.native.library import SPIN_COUNT, opened
from tests.patience import PATIENCE_S

OPEN = [sys.executable, "-c", "import numpy\nfrom puna.native.ggml import ggml\nggml()"]


def told_spin_count(**environ: str) -> str | None:
    """What OpenMP says it was told, by the report that it prints when it starts; None where the library has no OpenMP."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run(
        OPEN,
        env={**inherited, "OMP_DISPLAY_ENV": "VERBOSE", **environ},
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    found = re.search(r"GOMP_SPINCOUNT = '(\w+)'", done.stderr)
    return found.group(1) if found else None


@pytest.fixture(scope="module")
def uses_gomp() -> bool:
    opened()
    with open("/proc/self/maps") as maps:
        return "libgomp" in maps.read()


def test_waiting_threads_give_their_core_away_soon(uses_gomp: bool) -> None:
    assert told_spin_count() == (str(SPIN_COUNT) if uses_gomp else None)


def test_what_the_user_says_about_waiting_counts(uses_gomp: bool) -> None:
    assert told_spin_count(GOMP_SPINCOUNT="77") == ("77" if uses_gomp else None)
    assert told_spin_count(OMP_WAIT_POLICY="PASSIVE") == ("0" if uses_gomp else None)
