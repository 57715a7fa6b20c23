"""Tensors of a safetensors file, each checked against the file's size before anything is read.

Layout: the length of the header as a 64-bit number, the header as a JSON object of names, then the data.
Source: the format's description by its authors (huggingface/safetensors, README).
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from puna.errors import FileFormatError

MAX_HEADER_BYTES = 32 << 20  # some 200000 tensors: published files have a few thousand
MAX_DIMENSIONS = 8
FLOATS = ("F64", "F32", "F16", "BF16")
EIGHT_BITS = ("F8_E4M3", "F8_E8M0", "U8")  # numbers that mean something only beside others
_DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "u1",
    "BOOL": "u1",
    "F8_E4M3": "u1",
    "F8_E8M0": "u1",
}


class _Entry(msgspec.Struct):
    """Without a type it is the file's metadata, whose texts are never kept."""

    dtype: str = ""
    shape: list[int] = []
    data_offsets: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class StoredTensor:
    dtype: str  # as the format names it
    shape: tuple[int, ...]
    begin: int  # in the file
    n_bytes: int


class SafetensorsFile:
    """An open file; a context manager. *name* stands for it in messages, *prefix* is put before the names of its tensors.

    Errors: FileFormatError naming the tensor, from the constructor.
    """

    def __init__(self, path: Path, name: str = "", prefix: str = "") -> None:
        self.name = name or str(path)
        with path.open("rb") as file:
            size = path.stat().st_size
            header = _read_header(self.name, file.read(8), size)
            found = _check(self.name, _parse(self.name, file.read(header)), 8 + header, size)
            self.tensors = {prefix + tensor: stored for tensor, stored in found.items()}
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def check_floats(self, name: str) -> StoredTensor:
        """Errors: FileFormatError when it is not there or holds no floating point numbers."""
        stored = self.tensors.get(name)
        if stored is None:
            raise FileFormatError(f"{self.name}: there is no tensor {name}")
        if stored.dtype not in FLOATS:
            raise FileFormatError(f"{self.name}: tensor {name} is of type {stored.dtype}, not of floating point numbers")
        return stored

    def raw(self, name: str) -> npt.NDArray[Any]:
        """A copy of the stored numbers; those of type BF16 as uint16, of 8 bits as uint8.

        Errors: as check_floats.
        """
        stored = self.tensors.get(name)
        if stored is None or stored.dtype not in EIGHT_BITS:
            stored = self.check_floats(name)
        content = self._map[stored.begin : stored.begin + stored.n_bytes]
        return np.frombuffer(content, _DTYPES[stored.dtype]).reshape(stored.shape)

    def floats(self, name: str) -> npt.NDArray[np.float32]:
        """A copy as float32.

        Errors: as check_floats.
        """
        self.check_floats(name)
        raw = self.raw(name)
        if self.tensors[name].dtype == "BF16":  # the upper half of a float32
            raw = (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.astype(np.float32)

    def close(self) -> None:
        self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _read_header(name: str, length: bytes, size: int) -> int:
    if len(length) < 8:
        raise FileFormatError(f"{name}: too short for a safetensors file")
    (header,) = struct.unpack("<Q", length)
    if header > min(MAX_HEADER_BYTES, size - 8):
        raise FileFormatError(f"{name}: a header of {header} bytes does not fit a file of {size}")
    return int(header)


def _parse(file: str, header: bytes) -> dict[str, _Entry]:
    try:
        entries = msgspec.json.decode(header, type=dict[str, _Entry])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FileFormatError(f"{file}: the header is not what a safetensors file has: {error}") from error
    entries.pop("__metadata__", None)
    return entries


def _check(file: str, entries: dict[str, _Entry], data: int, size: int) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for name, entry in entries.items():
        begin, end = entry.data_offsets
        if entry.dtype not in _DTYPES:
            raise FileFormatError(f"{file}: tensor {name[:200]} is of type {entry.dtype[:20]}, which is not supported")
        if len(entry.shape) > MAX_DIMENSIONS or any(not 0 <= extent < 1 << 48 for extent in entry.shape):
            raise FileFormatError(f"{file}: tensor {name[:200]} has an impossible shape")
        n_bytes = prod(entry.shape) * np.dtype(_DTYPES[entry.dtype]).itemsize
        if not 0 <= begin <= end <= size - data or end - begin != n_bytes:
            raise FileFormatError(
                f"{file}: tensor {name[:200]} lies at {begin}..{end}, needs {n_bytes} bytes; the file ends before"
            )
        tensors[name] = StoredTensor(entry.dtype, tuple(entry.shape), data + begin, n_bytes)
    _check_overlaps(file, tensors)
    return tensors


def _check_overlaps(file: str, tensors: dict[str, StoredTensor]) -> None:
    """Otherwise a small file could stand for any number of large tensors."""
    end, before = 0, ""
    for name, stored in sorted(tensors.items(), key=lambda item: item[1].begin):
        if stored.n_bytes and stored.begin < end:
            raise FileFormatError(f"{file}: tensors {before[:200]} and {name[:200]} overlap")
        if stored.n_bytes:
            end, before = stored.begin + stored.n_bytes, name
