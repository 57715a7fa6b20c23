"""What the tests as a whole promise: they do not depend on who started them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import thorough
from tests.models.table import ROWS
from tests.parity.test_architectures import CASES
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


def test_processes_that_tests_start_do_not_compile_the_package_each_time(tmp_path: Path) -> None:
    """Where the environment forbids to write compiled modules down, every one of hundreds of processes would."""
    test = tmp_path / "test_it.py"
    test.write_text(
        "import subprocess, sys\n"
        "def test_it():\n"
        "    code = 'import sys; print(sys.dont_write_bytecode)'\n"
        "    assert subprocess.check_output([sys.executable, '-c', code], text=True).strip() == 'False'\n"
        "    assert not sys.dont_write_bytecode\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    command += ["-p", "tests.conftest", str(test)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE_S, env=environ)
    assert done.returncode == 0, done.stdout


def _is_thorough(case: object) -> bool:
    return isinstance(case, type(pytest.param())) and [mark.name for mark in case.marks] == ["thorough"]


def test_make_test_runs_the_first_cases_and_none_is_lost() -> None:
    found = thorough.first(2, "abcd")
    assert found[:2] == ["a", "b"]
    assert [case.values for case in found[2:]] == [("c",), ("d",)]
    assert all(map(_is_thorough, found[2:]))


def test_make_test_tries_every_architecture_once() -> None:
    ours = [case for case in CASES if not _is_thorough(case)]
    assert [name for name, _ in ours] == list(ROWS)
    assert len(CASES) == sum(len(row.variants) for row in ROWS.values())


def test_a_merge_runs_all() -> None:
    """What `make test` leaves out and nobody else asks for would be lost."""
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert any(re.fullmatch(r"(\w+=\w+ )*make (check )?test-all </dev/null", line) for line in lines), "and without ARGS"
    assert any(line.startswith("make check") for line in lines)
    makefile = (ROOT / "Makefile").read_text()
    assert '-m "not thorough"' not in makefile.partition("\ntest-all:")[2].partition("\n\n")[0]
