"""What the tests as a whole promise: they do not depend on who started them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
CTRL_C = "tests/unit/cli/test_cli_commands.py::test_ctrl_c_ends_quietly_and_cancels"


def test_ctrl_c_works_where_the_shell_ignores_it() -> None:
    """nohup, a script's background and some CI systems hand an ignored SIGINT down to all they start."""
    command = [
        "sh",
        "-c",
        "trap '' INT; exec \"$@\"",
        "sh",
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        CTRL_C,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
