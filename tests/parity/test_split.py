"""Layers of a model on several devices: the logits are those of one device, for every architecture.

The devices are synthetic (tests/synthetic_gpus.py): other memory, the same kernels. So this shows that weights, caches and
graphs are placed where the layout says, that results cross where the device changes, and that what is reported is what
was allocated; it does not show how the kernels of a real GPU compute, which is why equal means equal here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from tests.models.table import ROWS

LAYOUTS = ("one GPU", "two GPUs and the CPU", "output on the CPU")

Results = Mapping[tuple[str, str], Mapping[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("split")
    (folder / "notes").mkdir()
    environ = {
        **os.environ,
        "SYNTHETIC_GPUS": "SIM0:1000,SIM1:1000",
        "SYNTHETIC_GPUS_FOLDER": str(folder / "notes"),
        "GGML_NO_BACKTRACE": "1",
    }
    command = [sys.executable, "-m", "tests.parity.split_worker", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {(line["model"], line["layout"]): line for line in lines}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", ROWS)
def test_a_split_model_computes_the_same(results: Results, model: str, layout: str) -> None:
    result = results[model, layout]
    assert result["worst"] == 0
    n_used = 2 if layout == "two GPUs and the CPU" and len(result["reported"]) > 1 else 1
    assert sum(n_bytes > 0 for n_bytes in result["taken"].values()) == n_used
    for device, n_bytes in result["reported"].items():
        assert result["taken"][device] == pytest.approx(n_bytes, rel=0.001)
