"""The table of instruction sets: every class that this processor has, in every column, by one command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bench import classes as bench_classes
from bench.classes import CASES, NARROW

from puna.native.kernels.library import kernels
from tests import needs
from tests.tiny import write_llama

needs.kernels()


def test_every_class_is_measured_in_one_run(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "tiny.gguf", n_ctx=1024)
    command = ["-m", "bench.classes", "--file", str(model), "--turns", "1", "--steps", "1", "--json", str(tmp_path / "rows.json")]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    classes = [name for name in kernels().available() if name != "portable"]
    found = [(row["instructions"], row["what"]) for row in rows]
    assert sorted(found) == sorted((name, case.what) for case in CASES for name in classes)
    assert all(row["puna_ms"] > 0 and row["libllama_ms"] > 0 for row in rows)
    assert all(name in done.stdout for name in classes)


def test_narrow_registers_meet_a_peer_of_their_kind(tmp_path: Path) -> None:
    """The prebuilt library has no wider ones, whatever this processor has."""
    arguments = ["--file", str(write_llama(tmp_path / "tiny.gguf", n_ctx=1024)), "--turns", "1", "--steps", "1"]
    classes = [name for name in kernels().available() if name in NARROW]
    rows = bench_classes.measured_elsewhere(arguments, classes) if classes else []
    assert {(row.instructions, row.peer) for row in rows} == {(name, "avx2") for name in classes}
