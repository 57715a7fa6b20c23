"""Small GGUF files with the metadata that the store looks at, and little else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from puna.gguf.writer import GGUFWriter

JINJA = "{% for message in messages %}{{ message.content }}{% endfor %}"


def write_model(path: Path, *, seed: int = 0, architecture: str = "llama", file_type: int | None = 1, **keys: Any) -> Path:
    """A file with one tensor of 32 x 4 numbers; two underscores in a keyword stand for a point."""
    writer = GGUFWriter(architecture)
    if file_type is not None:
        writer.add("general.file_type", file_type)
    fields = {f"{architecture}.block_count": 1, f"{architecture}.context_length": 256, f"{architecture}.embedding_length": 32}
    fields |= {key.replace("__", "."): value for key, value in keys.items()}
    for key, value in fields.items():
        writer.add(key, value)
    writer.add_tensor("token_embd.weight", np.full((4, 32), seed, dtype=np.float32))
    writer.write(path)
    return path
