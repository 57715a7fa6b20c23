"""`make check` runs its tools side by side and says what each found."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from tools import check

from tests.patience import PATIENCE_S

# Each of two programs waits for a sign of the other: one after the other, neither would end.
MEET = """#!/bin/sh
touch "$1"
n=0
until [ -e "$2" ]; do sleep 0.02; n=$((n + 1)); [ $n -lt {tries} ] || exit 1; done
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in {
        "meet": MEET.format(tries=int(PATIENCE_S / 0.02)),
        "good": "#!/bin/sh\necho all is well\n",
        "bad": "#!/bin/sh\necho out\necho err >&2\nexit 3\n",
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(stat.S_IRWXU)
    monkeypatch.setattr(check, "PROGRAMS", tmp_path)
    return tmp_path


def test_all_run_at_once(programs: Path) -> None:
    here, there = str(programs / "here"), str(programs / "there")
    assert check.main({"one": ("meet", here, there), "other": ("meet", there, here)}) == 0


def test_what_failed_is_shown_and_counted(programs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert check.main({"fine": ("good",), "wrong": ("bad",)}) == 1
    shown = capfd.readouterr().out
    assert "fine     clean" in shown
    assert "all is well" not in shown
    assert "wrong    FAILED" in shown
    assert "out\nerr\n" in shown


def test_each_tool_is_installed() -> None:
    assert all((check.PROGRAMS / command[0]).exists() for command in check.CHECKS.values())
