"""Logits of models on one device and of the same models spread over several, in a process with synthetic GPUs.

Prints a JSON line for each model and layout: ``worst`` is the largest error over the largest logit, ``reported`` and
``taken`` are bytes by GPU, what the backend says and what was allocated there.
Run by test_split.py, since devices cannot be taken away again from the library in a process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from puna.kvcache.cache import NotSupported, SavingCache
from puna.wire import DeviceLayers
from tests import synthetic_gpus
from tests.models.table import ROWS
from tests.puna_engine import PunaEngine

Layers = list[tuple[str, int, int]]


def layouts(n: int) -> dict[str, Layers]:
    """Of a model with *n* blocks; the output is layer n."""
    return {
        "one GPU": [("SIM0", 0, n + 1)],
        "two GPUs and the CPU": [("SIM1", 1, n // 2 + 1), ("SIM0", n // 2 + 1, n + 1)],
        "output on the CPU": [("SIM0", 1, n)],
    }


def scenario(engine: PunaEngine) -> npt.NDArray[np.float32]:
    """Prompts of two sequences, steps of both at once, a copied prefix, a saved sequence in another place, a moved context."""
    rows: list[npt.NDArray[np.float32]] = []

    def step(tokens: list[int], positions: Any, sequences: list[int], outputs: list[int]) -> None:
        rows.append(engine.decode(tokens, positions, sequences, outputs).copy())

    prompt = [(7 * i + 3) % engine.n_vocab for i in range(40)]
    step(prompt, range(40), [0] * 40, [0, 20, 39])
    step(prompt[:17], range(17), [1] * 17, [16])
    for i in range(3):
        step([5 + i, 9 + i], [40 + i, 17 + i], [0, 1], [0, 1])
    engine.cache.copy_prefix(0, 2, 43)
    length = engine.cache.length(2)
    step([11], [length], [2], [0])
    assert isinstance(engine.cache, SavingCache)
    engine.cache.restore(3, engine.cache.save(1), 20)
    for sequence in (1, 3):
        step([13], [20], [sequence], [0])
    assert (rows[-1] == rows[-2]).all(), "what came back is not what was saved"
    try:
        engine.cache.remove(0, 8, 16)
        step([12], [35], [0], [0])
    except NotSupported:
        pass
    return np.concatenate(rows)


def main(folder: Path) -> None:
    devices = synthetic_gpus.from_environment()
    for name, row in ROWS.items():
        path = row.write(folder / "model.gguf", seed=3, **next(iter(row.variants.values())))
        limits: dict[str, Any] = {"n_ctx": 256, "n_sequences": 4, "n_threads": 1, **row.limits}
        with PunaEngine(path, **limits) as engine:
            expected = scenario(engine)
            n = engine.backend.n_layers
        for layout, layers in layouts(n).items():
            parts = [DeviceLayers(device=device, begin=begin, end=end) for device, begin, end in layers if begin < end]
            with PunaEngine(path, layers=parts, **limits) as engine:
                actual = scenario(engine)
                reported = {d.device: d.total for d in engine.backend.memory().devices if d.is_gpu}
                taken = {d.name.decode(): d.total - d.free() for d in devices}
            worst = float(np.abs(actual - expected).max() / np.abs(expected).max())
            line = {"model": name, "layout": layout, "worst": worst, "reported": reported, "taken": taken}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
