"""Cut a GGUF file into parts, as llama.cpp's gguf-split does: only the first has the model's metadata."""

from __future__ import annotations

from pathlib import Path

from puna.gguf.reader import GGUFFile
from puna.gguf.types import ValueType
from puna.gguf.writer import ALIGNMENT_KEY, GGUFWriter


def split(path: Path, n: int, folder: Path) -> list[Path]:
    """Parts of about as many tensors each, in *folder*."""
    folder.mkdir(exist_ok=True)
    paths = []
    with GGUFFile.open(path) as whole:
        tensors = list(whole.tensors.values())
        for number in range(n):
            writer = GGUFWriter(alignment=whole.alignment)
            if number == 0:
                for key in whole.metadata:
                    if key != ALIGNMENT_KEY:
                        writer.add_encoded(key, whole.encoded_value(key))
            writer.add("split.no", number, ValueType.UINT16)
            writer.add("split.count", n, ValueType.UINT16)
            writer.add("split.tensors.count", len(tensors), ValueType.INT32)
            for tensor in tensors[number * len(tensors) // n : (number + 1) * len(tensors) // n]:
                writer.add_raw_tensor(tensor.name, tensor.shape, tensor.type, whole.tensor_data(tensor.name))
            paths.append(folder / f"{path.stem}-{number + 1:05d}-of-{n:05d}.gguf")
            writer.write(paths[-1])
    return paths
