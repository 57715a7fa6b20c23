"""The table of instruction sets: every class that this processor has, in every column, by one command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bench.classes import CASES

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
    assert [(row["instructions"], row["what"]) for row in rows] == [(name, case.what) for case in CASES for name in classes]
    assert all(row["puna_ms"] > 0 and row["libllama_ms"] > 0 for row in rows)
    assert all(name in done.stdout for name in classes)
