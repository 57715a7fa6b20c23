"""Tiny files that see: a text model with the tokens its family needs, and a random encoder in both kinds of file.

An encoder is described once, with the keys and names of llama.cpp's converter, and written as a file of its own, or into the
text model's under the names that the ancestor's converter gives.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from puna.gguf.types import TensorType, ValueType
from puna.gguf.writer import GGUFWriter
from tests.models.dialect import Translation
from tests.tiny import CONTROL, NORMAL, quantize

Floats = npt.NDArray[np.float32]


@dataclass
class Encoder:
    """Keys without ``clip.``, tensors by name in numpy's order of axes. Matrices are written in *kind*, all else in F32."""

    seed: int = 0
    kind: TensorType = TensorType.F32
    keys: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Floats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def matrix(self, name: str, n_out: int, n_in: int, gain: float = 1.0) -> None:
        """Its product with values of unit size has unit size, times gain."""
        self.values(name, (n_out, n_in), gain / np.sqrt(n_in))

    def values(self, name: str, shape: tuple[int, ...], std: float = 1.0, mean: float = 0.0) -> None:
        self.tensors[name] = (mean + std * self.random.standard_normal(shape)).astype(np.float32)

    def norm(self, name: str, n: int, *, bias: bool = True) -> None:
        self.values(f"{name}.weight", (n,), 0.1, 1.0)
        if bias:
            self.values(f"{name}.bias", (n,), 0.1)

    def linear(self, name: str, n_out: int, n_in: int, *, bias: bool = True, gain: float = 1.0) -> None:
        self.matrix(f"{name}.weight", n_out, n_in, gain)
        if bias:
            self.values(f"{name}.bias", (n_out,), 0.2)

    def add_to(self, writer: GGUFWriter, rename: Mapping[str, str], leave_out: Sequence[str] = ()) -> None:
        """*rename*: patterns of parts of names. Patterns of *leave_out* are names as they are here."""
        for name, values in self.tensors.items():
            if any(re.fullmatch(pattern, name) for pattern in leave_out):
                continue
            found = name
            for pattern, replacement in rename.items():
                found = re.sub(pattern, replacement, found)
            is_matrix = values.ndim > 1 and "position" not in name and "query" not in name
            kind = self.kind if is_matrix else TensorType.F32
            if kind.block_size > 1 and (values.ndim > 2 or "input_projection" in name):  # which libmtmd transposes
                kind = TensorType.F16
            writer.add_raw_tensor(found, values.shape[::-1], kind, quantize(values, kind))

    def save(self, path: Path) -> Path:
        writer = GGUFWriter("clip")
        writer.add("general.type", "mmproj")
        writer.add("clip.has_vision_encoder", True)
        for key, value in self.keys.items():
            is_whole = isinstance(value, list) and all(isinstance(item, int) for item in value)
            if isinstance(value, np.int32):
                writer.add(f"clip.{key}", int(value), ValueType.INT32)
            else:
                writer.add(f"clip.{key}", value, element=ValueType.INT32 if is_whole else None)
        self.add_to(writer, {})
        writer.write(path)
        return path

    def save_with(
        self, text: Path, path: Path, *, rename: Mapping[str, str], keys: Mapping[str, Any], leave_out: Sequence[str] = ()
    ) -> Path:
        """One file of both, with these keys of the encoder."""
        merged = Translation(text)
        architecture, _ = merged.others["general.architecture"]
        writer = GGUFWriter(architecture)
        for key, (value, element) in merged.others.items():
            if key != "general.architecture":
                writer.add(key, value, element=element)
        for key, (value, element) in merged.values.items():
            writer.add(f"{architecture}.{key}", value, element=element)
        for key, value in keys.items():
            writer.add(f"{architecture}.{key}", value)
        for name, (shape, kind, data) in merged.tensors.items():
            writer.add_raw_tensor(name, shape, kind, data)
        self.add_to(writer, rename, leave_out)
        writer.write(path)
        return path


def add_tokens(path: Path, names: Sequence[str], *, plain: Sequence[str] = ()) -> Path:
    """More tokens at the end of a text model's vocabulary, control tokens and *plain* ones, with rows of their own."""
    file, random = Translation(path), np.random.default_rng(99)
    n_more = len(names) + len(plain)
    for key, more in (
        ("tokenizer.ggml.tokens", [*names, *plain]),
        ("tokenizer.ggml.token_type", [CONTROL] * len(names) + [NORMAL] * len(plain)),
        ("tokenizer.ggml.scores", [0.0] * len(names) + [-1000.0] * len(plain)),
    ):
        if key in file.others:
            known, element = file.others[key]
            file.others[key] = [*known, *more], element
    if "tokenizer.ggml.add_space_prefix" in file.others:
        file.others["tokenizer.ggml.add_space_prefix"] = False, None
    file.values["vocab_size"] = len(file.others["tokenizer.ggml.tokens"][0]), None
    for name in ("token_embd.weight", "output.weight", "per_layer_token_embd.weight"):
        if name in file.tensors:
            (n_embd, n_rows), kind, data = file.tensors[name]
            rows = (random.standard_normal((n_more, n_embd)) * 3 / np.sqrt(n_embd)).astype(np.float32)
            file.tensors[name] = (n_embd, n_rows + n_more), kind, data + quantize(rows, kind).tobytes()
    architecture, _ = file.others["general.architecture"]
    return file.save(path, architecture)
