"""A model without rounding: the same weights in F32, which are multiplied with activations as they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from puna.gguf.reader import GGUFFile
from puna.gguf.types import ValueType
from puna.gguf.writer import GGUFWriter
from puna.native import products

_LEFT_OUT = ("general.architecture", "general.alignment", "general.file_type", "general.quantization_version")


def exact_copy(path: Path, target: Path) -> Path:
    with GGUFFile.open(path) as file:
        writer = GGUFWriter(file.architecture)
        for key, value in file.metadata.items():
            if key == "tokenizer.ggml.token_type":
                writer.add(key, list(value), element=ValueType.INT32)
            elif key not in _LEFT_OUT:
                writer.add(key, value)
        data = np.memmap(path, np.uint8, "r")
        for name, tensor in file.tensors.items():
            raw = np.array(data[tensor.offset : tensor.offset + tensor.n_bytes])
            values = products.decode(int(tensor.type), raw, int(np.prod(tensor.shape)))
            writer.add_tensor(name, values.reshape(tuple(reversed(tensor.shape))))
        writer.write(target)
    return target
