"""What the tests as a whole promise: they do not depend on who started them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import thorough, times
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


def test_numpy_computes_in_the_thread_that_asks(tmp_path: Path) -> None:
    test = tmp_path / "test_it.py"
    test.write_text(
        "import threading, os\n"
        "import numpy as np\n"
        "def test_it():\n"
        "    before = len(os.listdir('/proc/self/task'))\n"
        "    np.ones((600, 600)) @ np.ones((600, 600))\n"
        "    assert len(os.listdir('/proc/self/task')) == before == threading.active_count()\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    command += ["-p", "tests.conftest", "-o", "faulthandler_timeout=0", str(test)]  # who watches over hangs is a thread, too
    environ = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE_S, env=environ)
    assert done.returncode == 0, done.stdout


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


def _programs(folder: Path, apt_get: str) -> list[str]:
    """What .ci/programs says on a machine that has none of them, where *apt_get* is run in place of the system's."""
    for name in ("bash", "cat", "touch", "chmod"):
        (folder / name).symlink_to(shutil.which(name) or name)
    for name, does in (("id", "echo 0"), ("apt-get", apt_get)):
        (folder / name).write_text(f"#!/bin/sh\n{does}\n")
        (folder / name).chmod(0o755)
    environ = {"PATH": str(folder)}
    done = subprocess.run(
        [ROOT / ".ci" / "programs"], env=environ, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stdout) == (0, "")
    return done.stderr.splitlines()


def test_programs_that_could_not_be_installed_are_named_with_the_tests_that_will_fail(tmp_path: Path) -> None:
    said = _programs(tmp_path, "exit 100")
    assert ".ci/programs: the list of packages could not be refreshed" in said
    assert ".ci/programs: qemu-user could not be installed" in said
    lost = [re.fullmatch(r".*: (\S+) is missing, so (\S+) will fail: sudo apt-get install (\S+)", line) for line in said]
    found = {match[1]: (match[2], match[3]) for match in lost if match}
    assert list(found) == ["docker-registry", "chromium", "aarch64-linux-gnu-g++", "qemu-aarch64"]
    for test, package in found.values():
        source = (ROOT / test).read_text() + (ROOT / "tests" / "needs.py").read_text()
        assert package in source, "the test's own message names it too"


def test_programs_that_can_be_installed_are_not_spoken_of(tmp_path: Path) -> None:
    programs = "docker-registry chromium aarch64-linux-gnu-g++ qemu-aarch64"
    makes = f'cd "${{0%/*}}" && touch {programs} && chmod +x {programs} && echo much'
    assert _programs(tmp_path, makes) == []


@pytest.mark.parametrize("skipped", ["@pytest.mark.skip(reason='of the moon')\n", ""])
def test_nothing_is_skipped_where_all_must_pass(tmp_path: Path, skipped: str) -> None:
    test = tmp_path / "test_it.py"
    inside = "pass" if skipped else "pytest.skip('of the moon')"
    test.write_text(f"import pytest\n{skipped}def test_it():\n    {inside}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    command += ["-p", "tests.conftest", str(test)]
    for tests, status in (("complete", 1), ("", 0)):
        environ = {**os.environ, "PUNA_TESTS": tests}
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE_S, env=environ)
        assert done.returncode == status, done.stdout
        assert "of the moon" in done.stdout


def test_the_files_that_take_longest_begin_first() -> None:
    known = times.kept_s()
    assert {path for path in known if not (ROOT / path).exists()} == set()
    assert [*known.values()] == sorted(known.values(), reverse=True)
    longest = [path for path in known if path.startswith("tests/unit/")]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *reversed(longest[:3])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout
    assert list(dict.fromkeys(re.findall(r"^(tests/\S+?)::", done.stdout, re.MULTILINE))) == longest[:3]


def test_what_a_file_costs_is_shown_and_processes_count(tmp_path: Path) -> None:
    busy = "import time\nwhile time.process_time() < 0.3: pass"
    test = tmp_path / "test_busy.py"
    test.write_text(f"import subprocess, sys\ndef test_it():\n    subprocess.run([sys.executable, '-c', {busy!r}], check=True)\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    command += ["-p", "tests.times", "-n", "1", "-k", "it", str(test)]
    kept = times.KEPT.read_text()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout
    shown = re.search(r"^ *([\d.]+) s +1 tests", done.stdout, re.MULTILINE)
    assert shown
    assert float(shown[1]) > 0.2
    assert times.KEPT.read_text() == kept, "some of a file's tests say nothing of the whole file"


def test_the_order_of_the_files_is_kept_by_all_workers() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "--dist loadfile --no-loadscope-reorder" in makefile
    assert makefile.count("$(BY_FILE)") == 2
