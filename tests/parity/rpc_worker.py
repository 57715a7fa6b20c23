"""Logits of models in one process and of the same models with layers on workers, as split_worker.py has them of GPUs.

Prints a JSON line for each model and layout. Run by test_rpc.py: a process that has lost a worker is lost itself.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from puna.wire import DeviceLayers
from tests.models.table import ROWS
from tests.parity.split_worker import scenario
from tests.puna_engine import PunaEngine


def main(folder: Path, first: str, second: str, *models: str) -> None:
    """*first* and *second* are names of devices. Puna's own products are only for a model that is here in full."""
    for name in models:
        row = ROWS[name]
        path = row.write(folder / "model.gguf", seed=3, **next(iter(row.variants.values())))
        limits: dict[str, Any] = {"n_ctx": 256, "n_sequences": 4, "n_threads": 1, "use_kernels": False, **row.limits}
        with PunaEngine(path, **limits) as engine:
            expected = scenario(engine)
            n = engine.backend.n_layers
        layouts = {
            "one worker": [(first, 0, n + 1)],
            "two workers and the CPU": [(second, 1, n // 2 + 1), (first, n // 2 + 1, n + 1)],
        }
        for layout, layers in layouts.items():
            parts = [DeviceLayers(device=device, begin=begin, end=end) for device, begin, end in layers if begin < end]
            with PunaEngine(path, layers=parts, **limits) as engine:
                actual = scenario(engine)
                reported = {d.device: d.total for d in engine.backend.memory().devices if d.is_gpu}
            worst = float(np.abs(actual - expected).max() / np.abs(expected).max())
            print(json.dumps({"model": name, "layout": layout, "worst": worst, "reported": reported}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
