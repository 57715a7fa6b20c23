"""What is told of the tensor library and of the machine."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from puna.errors import NativeLibraryError
from puna.native import pace, report
from puna.native.providers import Provider, chosen
from tests.unit.native.test_selftest import Fake


def test_it_carries_facts_and_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_faster", lambda provider: {"product": 1.5})
    told = report.report(with_facts=True, cache_dir=tmp_path / "cache", command=Fake(tmp_path, wrong="CPU q4").command)
    assert json.loads(json.dumps(told))["verdict"]["combinations"][1]["status"] == "broken"
    assert told["verdict"]["version"] == "9.9"
    assert told["cpu"]["threads"] >= 1
    assert told["library"]["package"] == chosen().package
    assert Path(told["library"]["folder"]).is_dir()
    assert told["faster"] == {"product": 1.5}
    assert isinstance(told["build"], dict)


def test_a_missing_library_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Provider:
        raise NativeLibraryError("the tensor library is not installed")

    monkeypatch.setattr(report, "chosen", missing)
    assert report.report(with_facts=False, cache_dir=tmp_path)["error"] == "the tensor library is not installed"


def test_libraries_take_turns_and_their_best_times_count(tmp_path: Path) -> None:
    script = tmp_path / "pace.py"
    script.write_text(
        "import json, os, pathlib, sys\n"
        "turns = pathlib.Path(sys.argv[1]); name = os.environ['PUNA_LIBRARY']\n"
        "with turns.open('a') as file: file.write(name + ' ')\n"
        "n = turns.read_text().split().count(name)\n"
        "print(json.dumps({'product': {'one': [9, 2, 3], 'other': [6, 8, 4]}[name][n - 1]}))\n"
    )
    command = [sys.executable, "-S", str(script), str(tmp_path / "turns")]
    assert pace.compared("one", "other", command) == {"product": 2.0}
    assert (tmp_path / "turns").read_text().split() == ["one", "other"] * 3
    assert pace.compared("one", "nobody", command) is None


def test_the_library_that_is_open_is_measured() -> None:
    assert all(0 < value < 10 for value in pace.seconds().values())


def test_time_without_a_core_does_not_count() -> None:
    """Who asks has a machine that does other things as well."""

    def held_up() -> bool:
        time.sleep(0.02)
        return True

    assert pace.best(held_up) < 0.01
    assert pace.best(lambda: False) == math.inf


def test_one_thread_is_measured() -> None:
    """Several would wait for each other where other processes want their cores."""
    counts = "import psutil; from puna.native import pace; pace.seconds(); print(psutil.Process().num_threads())"
    environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", counts], capture_output=True, text=True, check=False, timeout=120, env=environ)
    assert done.stdout == "1\n", done.stderr
