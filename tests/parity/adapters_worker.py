"""Logits of a model under adapters on one device and spread over several, in a process with synthetic GPUs.

Prints a JSON line for each layout; run by test_adapters.py, since devices cannot be taken away again from the library.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from puna.wire import DeviceLayers
from tests import synthetic_gpus
from tests.lora import write_lora
from tests.puna_engine import PunaEngine
from tests.tiny import write_llama

LAYOUTS = {  # of a model with two layers, the output being a third
    "one GPU": [("SIM0", 0, 3)],
    "a GPU and the CPU": [("SIM0", 1, 2)],
    "two GPUs": [("SIM1", 0, 1), ("SIM0", 1, 3)],
}


def main(folder: Path) -> None:
    devices = synthetic_gpus.from_environment()
    model = write_llama(folder / "m.gguf", seed=7)
    weights = [f"blk.{i}.{name}.weight" for i in range(2) for name in ("attn_q", "attn_output", "ffn_down")]
    adapters = [write_lora(folder / "a.gguf", model, [*weights, "token_embd.weight", "output.weight"])]
    ids = [(7 * i + 3) % 300 for i in range(40)]
    batch = (ids, range(40), [0] * 40, [0, 20, 39])
    with PunaEngine(model, n_ctx=128, n_threads=1, adapters=adapters) as engine:
        expected = engine.decode(*batch).copy()
    for layout, layers in LAYOUTS.items():
        parts = [DeviceLayers(device=device, begin=begin, end=end) for device, begin, end in layers]
        with PunaEngine(model, n_ctx=128, n_threads=1, adapters=adapters, layers=parts) as engine:
            actual = engine.decode(*batch).copy()
            reported = {d.device: d.total for d in engine.backend.memory().devices if d.is_gpu}
            taken = {d.name.decode(): d.total - d.free() for d in devices}
        worst = float(np.abs(actual - expected).max() / np.abs(expected).max())
        print(json.dumps({"layout": layout, "worst": worst, "reported": reported, "taken": taken}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
