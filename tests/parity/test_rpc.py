"""Layers of a model on other machines: the logits are those of this one, for every architecture.

The workers are real ones on loopback, with the same library: so prompts, steps of several sequences, copied prefixes, saved
sequences and moved contexts are equal to the last bit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from tests import rpc_workers
from tests.models.table import ROWS

rpc_workers.needed()

LAYOUTS = ("one worker", "two workers and the CPU")
# Full attention, windows, recurrent states, experts: the others are more of the same.
FEW = ("llama", "gemma3", "mamba2", "qwen3moe")
MODELS = [name if name in FEW else pytest.param(name, marks=pytest.mark.thorough) for name in ROWS]

Results = Mapping[tuple[str, str], Mapping[str, Any]]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Of the models that are asked for."""
    folder = tmp_path_factory.mktemp("rpc")
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    models = dict.fromkeys(str(item.callspec.params["model"]) for item in items)
    with rpc_workers.running(2) as workers:
        command = [sys.executable, "-m", "tests.parity.rpc_worker", str(folder), *(worker.device for worker in workers), *models]
        environ = {**os.environ, "GGML_NO_BACKTRACE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {(line["model"], line["layout"]): line for line in lines}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_a_model_with_layers_on_workers_computes_the_same(results: Results, model: str, layout: str) -> None:
    result = results[model, layout]
    assert result["worst"] == 0
    n_used = 2 if layout == "two workers and the CPU" and len(result["reported"]) > 1 else 1
    assert sum(n_bytes > 0 for n_bytes in result["reported"].values()) == n_used
