"""Spell GGUF files out byte by byte, so that tests can write what the writer refuses to."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

from puna.gguf.types import TensorType, ValueType


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


def array(name: str, element: int, count: int, items: bytes) -> bytes:
    return key(name, ValueType.ARRAY, struct.pack("<IQ", element, count) + items)


def tensor(name: str | bytes, shape: Sequence[int], kind: int = TensorType.F32, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


ARCHITECTURE = key("general.architecture", ValueType.STRING, string("llama"))


def assemble(
    keys: Sequence[bytes] = (ARCHITECTURE,),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_keys: int | None = None,
    n_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    counts = (len(tensors) if n_tensors is None else n_tensors, len(keys) if n_keys is None else n_keys)
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data if data else head


def write(folder: Path, content: bytes) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(content)
    return path
