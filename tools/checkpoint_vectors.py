"""Writes what tests/checkpoints expects: logits that the authors' program (transformers, with torch) computes.

Run it where both are installed, which tests need neither of: ``python tools/checkpoint_vectors.py [name ...]``.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.checkpoints.cases import CASES, ROWS, STRIDE, TOKENS, Case  # noqa: E402  # after the path that leads there
from tests.checkpoints.weights import random_weights  # noqa: E402


def main(names: list[str]) -> None:
    target = ROOT / "tests" / "checkpoints" / "vectors"
    target.mkdir(exist_ok=True)
    for name in names or CASES:
        found = vectors(CASES[name])
        (target / f"{name}.json").write_text(json.dumps(found, separators=(",", ":")) + "\n")
        spread = np.std(found["logits"])
        print(f"{name}: {len(found['shapes'])} tensors, logits of size {spread:.3}")


def vectors(case: Case) -> dict[str, Any]:
    """The shapes of all tensors, by the names that the program publishes them under, and rows of logits; of an encoder the
    vector of the whole text.
    """
    torch, transformers, safetensors = (import_module(name) for name in ("torch", "transformers", "safetensors.numpy"))
    cls = getattr(transformers, case.model)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(case.config))
        config = cls.config_class.from_pretrained(folder)
        cls(config).save_pretrained(folder / "made")
        made = safetensors.load_file(folder / "made" / "model.safetensors")
        shapes = {tensor: list(values.shape) for tensor, values in sorted(made.items())}
        weights = random_weights(shapes, less_one=case.less_one, short_queries=case.short_queries)
        safetensors.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        model, report = cls.from_pretrained(folder, output_loading_info=True, **options)
        missing = {key: value for key, value in report.items() if value}
        if missing:
            raise SystemExit(f"{case.model}: not loaded as it was written: {missing}")
        with torch.no_grad():
            output = model.eval()(torch.tensor([TOKENS]))
        if hasattr(output, "logits"):
            rows = output.logits[0].numpy()[ROWS]
        else:  # an encoder, pooled by the mean
            rows = output.last_hidden_state[0].numpy().mean(0, keepdims=True)
    return {"shapes": shapes, "logits": [[float(f"{value:.6g}") for value in row[::STRIDE]] for row in rows]}


if __name__ == "__main__":
    main(sys.argv[1:])
