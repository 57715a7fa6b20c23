"""A model file in the words of another program: other names of keys and tensors, or tensors cut differently."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from puna.gguf.metadata import LazyArray
from puna.gguf.reader import GGUFFile
from puna.gguf.types import TensorType
from puna.gguf.writer import GGUFWriter


class Translation:
    """A file to be written anew: change its parts, then save. The keys of ``values`` are without the architecture."""

    def __init__(self, path: Path) -> None:
        self.values: dict[str, Any] = {}
        self.tensors: dict[str, tuple[tuple[int, ...], TensorType, bytes]] = {}  # shape in ggml's order
        self.others: dict[str, Any] = {}
        with GGUFFile.open(path) as file:
            for key, value in file.metadata.items():
                plain = (list(value), value.element) if isinstance(value, LazyArray) else (value, None)
                name = key.removeprefix(f"{file.architecture}.")
                (self.values if name != key else self.others)[name] = plain
            for info in file.tensors.values():
                self.tensors[info.name] = info.shape, info.type, bytes(file.tensor_data(info.name))

    def rename(self, names: Mapping[str, str]) -> None:
        """Parts of tensors' names."""
        for old, new in names.items():
            self.tensors = {name.replace(old, new): tensor for name, tensor in self.tensors.items()}

    def interleave(self, first: str, second: str, packed: str) -> None:
        """The rows of two tensors in turn as one tensor; of biases, one for each row, the numbers."""
        shape, kind, data = self.tensors.pop(first)
        _, _, other = self.tensors.pop(second)
        axis = 0 if packed.endswith("bias") else 1
        n_rows = int(np.prod(shape[axis:]))
        rows = (np.frombuffer(part, np.uint8).reshape(n_rows, 1, -1) for part in (data, other))
        doubled = (*shape[:axis], 2 * shape[axis], *shape[axis + 1 :])
        self.tensors[packed] = doubled, kind, np.concatenate(tuple(rows), 1).tobytes()

    def save(self, path: Path, architecture: str) -> Path:
        writer = GGUFWriter(architecture)
        named = {f"{architecture}.{name}": value for name, value in self.values.items()}
        for key, (value, element) in (self.others | named).items():
            if key != "general.architecture":
                writer.add(key, value, element=element)
        for name, (shape, kind, data) in self.tensors.items():
            writer.add_raw_tensor(name, shape, kind, data)
        writer.write(path)
        return path
