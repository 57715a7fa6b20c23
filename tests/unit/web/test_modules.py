"""The modules of the page that need no browser, under node's own test runner."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests import needs
from tests.patience import PATIENCE_S

HERE = Path(__file__).parent


def test_modules_do_what_their_tests_say() -> None:
    command = [needs.node(), "--test", "--test-reporter=tap", str(HERE / "modules.test.mjs")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# fail 0" in done.stdout
    n_tests = (HERE / "modules.test.mjs").read_text().count('\ntest("')
    assert f"# pass {n_tests}\n" in done.stdout
