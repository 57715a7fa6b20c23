"""Write complete GGUF files, version 3, little-endian.

Knows the container only: which keys and tensors a model needs is the caller's business.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from puna.gguf.types import SCALARS, TensorType, ValueType

VERSION = 3
DEFAULT_ALIGNMENT = 32
ALIGNMENT_KEY = "general.alignment"
MAX_NAME_BYTES = 63  # ggml keeps names in 64 bytes, the terminator included

Data = bytes | bytearray | memoryview | np.ndarray[Any, Any]
Later = Callable[[], Data | Iterator[Data]]
"""Gives a tensor's bytes when they are written, at once or in parts."""

_DTYPES = {
    "float32": TensorType.F32,
    "float16": TensorType.F16,
    "float64": TensorType.F64,
    "int8": TensorType.I8,
    "int16": TensorType.I16,
    "int32": TensorType.I32,
    "int64": TensorType.I64,
}


@dataclass(frozen=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]  # ggml order
    type: TensorType
    data: Data | Later
    n_bytes: int


class GGUFWriter:
    """Collects metadata and tensors, then writes them in one go; nothing but references is held until then."""

    def __init__(self, architecture: str | None = None, *, alignment: int = DEFAULT_ALIGNMENT) -> None:
        if alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"alignment {alignment} is not a power of two")
        self.alignment = alignment
        self._values: dict[str, bytes] = {}
        self._tensors: dict[str, _Tensor] = {}
        if architecture is not None:
            self.add("general.architecture", architecture)
        if alignment != DEFAULT_ALIGNMENT:
            self._values[ALIGNMENT_KEY] = struct.pack("<I", ValueType.UINT32) + _scalar(alignment, ValueType.UINT32)

    def add(self, key: str, value: Any, kind: ValueType | None = None, element: ValueType | None = None) -> None:
        """Add one metadata value; types that are not given follow from the value.

        An int becomes UINT32 where it fits, else INT32 or 64 bits; a float FLOAT32; a sequence or numpy array an array
        whose *element* type follows from its items.
        Errors: ValueError for a duplicate key, the alignment (it is the writer's own), a value that does not fit its
        type, or an empty array without *element*.
        """
        if key == ALIGNMENT_KEY:
            raise ValueError(f"{key} is given to the writer when it is made, because it decides where tensors lie")
        if key in self._values:
            raise ValueError(f"key {key!r} was added before")
        if kind is None:
            kind = _infer(value)
        body = _array(value, element) if kind is ValueType.ARRAY else _scalar(value, kind)
        self._values[key] = struct.pack("<I", kind) + body

    def add_encoded(self, key: str, value: bytes) -> None:
        """Add a metadata value as it stands in another file.

        Errors: ValueError for a duplicate key, or the alignment.
        """
        if key == ALIGNMENT_KEY or key in self._values:
            raise ValueError(f"key {key!r} was added before, or is the writer's own")
        self._values[key] = value

    def add_tensor(self, name: str, array: np.ndarray[Any, Any]) -> None:
        """Add a tensor as its array stands; numpy's last axis is ggml's first."""
        kind = _DTYPES.get(array.dtype.name)
        if kind is None:
            raise ValueError(f"tensor {name!r}: no tensor type for dtype {array.dtype}")
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        self.add_raw_tensor(name, tuple(reversed(array.shape)), kind, np.ascontiguousarray(little))

    def add_raw_tensor(self, name: str, shape: Sequence[int], kind: TensorType, data: Data | Later) -> None:
        """Add a tensor that is encoded already; a callable is asked for its bytes only when the file is written.

        Shapes: *shape* in ggml order, fastest axis first.
        Errors: ValueError for a duplicate or overlong name, a row that is not whole blocks, or data of the wrong length.
        """
        if name in self._tensors:
            raise ValueError(f"tensor {name!r} was added before")
        if len(name.encode()) > MAX_NAME_BYTES:
            raise ValueError(f"tensor name {name!r} is longer than {MAX_NAME_BYTES} bytes")
        if len(shape) > 4 or any(extent < 1 for extent in shape):
            raise ValueError(f"tensor {name!r} has the shape {tuple(shape)}; one to four positive dimensions are possible")
        n_bytes = kind.n_bytes(shape[0] if shape else 1)
        for extent in shape[1:]:
            n_bytes *= extent
        if not callable(data):
            _check_length(name, data, n_bytes)
        self._tensors[name] = _Tensor(name, tuple(shape), kind, data, n_bytes)

    def write(self, path: str | Path) -> None:
        """Write the file, replacing what is there.

        Errors: ValueError when a callable returns data of the wrong length; OSError from the file system.
        """
        with open(path, "wb") as file:
            self.write_to(file)

    def write_to(self, file: BinaryIO) -> None:
        head = self._head()
        file.write(head)
        if not self._tensors:
            return
        file.write(bytes(-len(head) % self.alignment))
        for tensor in self._tensors.values():
            _write(tensor, file)
            file.write(bytes(-tensor.n_bytes % self.alignment))

    def _head(self) -> bytes:
        parts = [b"GGUF", struct.pack("<IQQ", VERSION, len(self._tensors), len(self._values))]
        for key, encoded in self._values.items():
            parts += [_string(key), encoded]
        offset = 0
        for tensor in self._tensors.values():
            parts += [
                _string(tensor.name),
                struct.pack(f"<I{len(tensor.shape)}QIQ", len(tensor.shape), *tensor.shape, tensor.type, offset),
            ]
            offset += tensor.n_bytes + -tensor.n_bytes % self.alignment
        return b"".join(parts)


def _write(tensor: _Tensor, file: BinaryIO) -> None:
    data = tensor.data() if callable(tensor.data) else tensor.data
    if not isinstance(data, Iterator):
        _check_length(tensor.name, data, tensor.n_bytes)
        file.write(_bytes_of(data))
        return
    written = 0
    for part in data:
        written += file.write(_bytes_of(part))
    if written != tensor.n_bytes:
        raise ValueError(f"tensor {tensor.name!r} needs {tensor.n_bytes} bytes, not {written}")


def _bytes_of(data: Data) -> memoryview:
    return memoryview(data.data if isinstance(data, np.ndarray) else data).cast("B")


def _check_length(name: str, data: Data, n_bytes: int) -> None:
    found = data.nbytes if isinstance(data, np.ndarray | memoryview) else len(data)
    if found != n_bytes:
        raise ValueError(f"tensor {name!r} needs {n_bytes} bytes, not {found}")


def _infer(value: Any) -> ValueType:
    if isinstance(value, str | bytes):
        return ValueType.STRING
    if isinstance(value, bool | np.bool_):
        return ValueType.BOOL
    if isinstance(value, int | np.integer):
        return _narrowest([int(value)])
    if isinstance(value, float | np.floating):
        return ValueType.FLOAT32
    if isinstance(value, Iterable):
        return ValueType.ARRAY
    raise ValueError(f"no GGUF type holds a {type(value).__name__}")


def _narrowest(values: Sequence[int]) -> ValueType:
    low, high = min(values), max(values)
    for kind, begin, end in (
        (ValueType.UINT32, 0, 2**32),
        (ValueType.INT32, -(2**31), 2**31),
        (ValueType.UINT64, 0, 2**64),
        (ValueType.INT64, -(2**63), 2**63),
    ):
        if begin <= low and high < end:
            return kind
    raise ValueError(f"no GGUF integer type holds both {low} and {high}")


def _infer_element(items: Sequence[Any]) -> ValueType:
    if not items:
        raise ValueError("an empty array needs its element type given")
    kinds = {_infer(item) for item in items}
    if len(kinds) == 1:
        return kinds.pop()
    if kinds <= {ValueType.UINT32, ValueType.INT32, ValueType.UINT64, ValueType.INT64}:
        return _narrowest([int(item) for item in items])
    raise ValueError("the items of an array must all have the same type")


def _scalar(value: Any, kind: ValueType) -> bytes:
    if kind is ValueType.STRING:
        return _string(value)
    if kind is ValueType.BOOL:
        if value not in (0, 1):
            raise ValueError(f"{value!r} does not fit BOOL")
        return bytes([bool(value)])
    try:
        return SCALARS[kind].pack(value)
    except (struct.error, OverflowError) as error:
        raise ValueError(f"{value!r} does not fit {kind.name}: {error}") from error


def _string(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def _array(value: Iterable[Any], element: ValueType | None) -> bytes:
    items = value.tolist() if isinstance(value, np.ndarray) else list(value)
    if element is None:
        element = _infer_element(items)
    if element is ValueType.ARRAY:
        raise ValueError("arrays of arrays are not written")
    return struct.pack("<IQ", element, len(items)) + b"".join(_scalar(item, element) for item in items)
