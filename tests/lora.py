"""Random LoRA adapters for the models of tests.tiny, in the form that llama.cpp reads."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from puna.gguf.lora import TABLE
from puna.gguf.reader import GGUFFile
from puna.gguf.types import ValueType
from puna.gguf.writer import GGUFWriter


def write_lora(
    path: str | Path,
    model: str | Path,
    weights: Iterable[str],
    *,
    rank: int = 4,
    alpha: float | None = 8.0,
    seed: int = 0,
    dtype: str = "float32",
    std: float = 0.15,
    keys: dict[str, Any] | None = None,
) -> Path:
    """An adapter that changes *weights* of the model at the path *model*; *keys* replace metadata."""
    random = np.random.default_rng(seed)
    with GGUFFile.open(model) as base:
        metadata: dict[str, Any] = {"general.type": "adapter", "adapter.type": "lora", **(keys or {})}
        writer = GGUFWriter(metadata.pop("general.architecture", base.architecture))
        for key, value in metadata.items():
            writer.add(key, value)
        if alpha is not None:
            writer.add("adapter.lora.alpha", alpha, ValueType.FLOAT32)
        for weight in weights:
            n_in, n_out, *stack = base.tensors[weight].shape
            shapes = ((n_out, rank), (n_in, rank)) if weight == TABLE else ((rank, n_in), (n_out, rank))
            for part, shape in zip(("lora_a", "lora_b"), shapes, strict=True):
                values = std * random.standard_normal((*reversed(stack), *shape))
                writer.add_tensor(f"{weight}.{part}", values.astype(dtype))
    writer.write(path)
    return Path(path)
