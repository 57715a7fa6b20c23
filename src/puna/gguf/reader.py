"""Open a GGUF file and check all of it before anything is believed: versions 2 and 3, little-endian.

Every count, length, shape and offset is held against the size of the file before memory is spent on it, so a hostile file
costs at most what its own size allows. Nothing here interprets tensors or loads them.
Source: the format's description in ggml's gguf.h.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import stat
import struct
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

from puna.errors import FileFormatError, NotFound
from puna.gguf import strings
from puna.gguf.metadata import LazyArray, Metadata
from puna.gguf.types import SCALARS, TensorType, ValueType

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 24
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 20
MAX_KEY_BYTES = (1 << 16) - 1  # the format's own limit
MAX_NAME_BYTES = 63  # ggml keeps names in 64 bytes, the terminator included
MAX_STRING_BYTES = 1 << 26
MAX_DIMENSIONS = 4

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_DESCRIPTIONS = tuple(struct.Struct(f"<{n_dims}QIQ") for n_dims in range(MAX_DIMENSIONS + 1))  # shape, type, offset
_TYPES = {int(kind): (kind.block_size, kind.block_bytes, kind) for kind in TensorType}
_SMALLEST_KEY = 8 + 4 + 1  # an empty name, the type, one byte of value
_SMALLEST_TENSOR = 8 + 4 + 4 + 8  # an empty name, no dimensions, the type, the offset
_NO_BOOLEAN = re.compile(rb"[^\x00\x01]")
_LEGACY_MAGICS = (b"lmgg", b"fmgg", b"tjgg", b"algg", b"GGLA", b"GGML", b"GGJT")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. *shape* is in ggml's order, fastest axis first; *offset* counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    n_bytes: int

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)


class GGUFFile:
    """An open model file: metadata, and where its tensors are. A context manager; ``close`` may be called twice."""

    def __init__(self, path: str | Path, source: mmap.mmap, status: os.stat_result) -> None:
        self.path = str(path)
        self.status = status  # as the file was when it was opened
        self.size = len(source)
        self._source = source
        head = _Parser(self.path, source)
        self.version, n_tensors, n_keys = head.header()
        self.metadata = Metadata(self.path, head.values(n_keys))
        self._places = head.places
        self.alignment = _alignment(head, self.metadata)
        described = head.tensors(n_tensors)
        self.data_offset = head.position + (-head.position % self.alignment if described else 0)
        self.tensors = self._placed(head, described)
        self._check_overlaps()

    @classmethod
    def open(cls, path: str | Path) -> GGUFFile:
        """Map a file and read its metadata.

        Errors: NotFound when there is no such file; FileFormatError naming key or tensor and byte offset when it is malformed.
        """
        source, status = _map(path)
        try:
            return cls(path, source, status)
        except BaseException:
            source.close()
            raise

    @property
    def architecture(self) -> str:
        return self.metadata.architecture

    def encoded_value(self, key: str) -> bytes:
        """A value of the metadata as it stands in the file, its type included."""
        begin, end = self._places[key]
        return self._source[begin:end]

    def tensor_data(self, name: str) -> memoryview:
        """A tensor's encoded bytes, not copied; the view keeps the mapping alive.

        Errors: NotFound for a name that is not in the file.
        """
        info = self.tensors.get(name)
        if info is None:
            raise NotFound(f"{self.path} has no tensor {name!r}")
        return memoryview(self._source)[info.offset : info.offset + info.n_bytes]

    def close(self) -> None:
        try:
            self._source.close()
        except BufferError:  # views of tensor data are still held; the mapping goes with the last of them
            return

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _placed(self, head: _Parser, described: dict[str, _Description]) -> dict[str, TensorInfo]:
        begin, size, mask = self.data_offset, self.size, self.alignment - 1
        placed: dict[str, TensorInfo] = {}
        for name, shape, kind, offset, n_bytes, position in described.values():
            if offset & mask:
                head.fail(f"tensor {name!r}: offset {offset} is not a multiple of {self.alignment}", position)
            at = begin + offset
            if at + n_bytes > size:
                head.fail(
                    f"tensor {name!r}: its data (bytes {at} to {at + n_bytes}) reaches beyond the file ({size} bytes); "
                    "the file is truncated or damaged",
                    position,
                )
            placed[name] = TensorInfo(name, shape, kind, at, n_bytes)
        return placed

    def _check_overlaps(self) -> None:
        end, before = 0, ""
        for info in sorted(self.tensors.values(), key=attrgetter("offset")):
            if info.offset < end:
                raise FileFormatError(f"{self.path}: tensors {before!r} and {info.name!r} overlap at byte {info.offset}")
            end, before = info.offset + info.n_bytes, info.name


class _Description(NamedTuple):
    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int  # from the start of the tensor data
    n_bytes: int
    position: int  # of this description in the file, for messages


class _Parser:
    """A position in the file, moved only over bytes that are there."""

    def __init__(self, path: str, source: mmap.mmap) -> None:
        self.path = path
        self.source = source
        self.size = len(source)
        self.position = 0
        self.places: dict[str, tuple[int, int]] = {}  # of values by key, their types included

    def fail(self, what: str, position: int | None = None) -> NoReturn:
        raise FileFormatError(f"{self.path}: {what} (at byte {self.position if position is None else position})")

    def take(self, n_bytes: int, what: str) -> int:
        """Move over *n_bytes* and return where they begin."""
        begin = self.position
        if n_bytes > self.size - begin:
            self.fail(f"the file ends inside {what}: {n_bytes} bytes wanted, {self.size - begin} left")
        self.position = begin + n_bytes
        return begin

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.source, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.source, self.take(8, what))[0])

    def text(self, what: str, max_bytes: int) -> str:
        begin = self.position
        length = self.u64(f"the length of {what}")
        if length > max_bytes:
            self.fail(f"{what} claims a length of {length} bytes, more than {max_bytes}", begin)
        at = self.take(length, what)
        try:
            return self.source[at : at + length].decode()
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not UTF-8: {error.reason}", at + error.start)

    def header(self) -> tuple[int, int, int]:
        """Version, number of tensors, number of keys."""
        magic = self.source[self.take(4, "the magic number") : 4]
        if magic in _LEGACY_MAGICS:
            self.fail("this is a GGML file from before GGUF; convert the model anew", 0)
        if magic != MAGIC:
            self.fail(f"not a GGUF file: it begins with {magic!r}", 0)
        version = self.u32("the version")
        if version and version & 0xFFFF == 0:
            self.fail("a big-endian GGUF file; only little-endian ones are read here", 4)
        if version not in (2, 3):
            self.fail(f"GGUF version {version} is not supported, only 2 and 3", 4)
        n_tensors, n_keys = self.u64("the number of tensors"), self.u64("the number of keys")
        left = self.size - self.position
        if n_keys > min(MAX_KEYS, left // _SMALLEST_KEY):
            self.fail(f"{n_keys} keys cannot be in a file of {self.size} bytes or are more than {MAX_KEYS}", 16)
        if n_tensors > min(MAX_TENSORS, left // _SMALLEST_TENSOR):
            self.fail(f"{n_tensors} tensors cannot be in a file of {self.size} bytes or are more than {MAX_TENSORS}", 8)
        return version, n_tensors, n_keys

    def values(self, count: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for index in range(count):
            begin = self.position
            key = self.text(f"the name of key {index}", MAX_KEY_BYTES)
            if not key:
                self.fail(f"key {index} has an empty name", begin)
            if key in values:
                self.fail(f"key {key!r} appears twice", begin)
            begin = self.position
            values[key] = self.value(key)
            self.places[key] = begin, self.position
        return values

    def value(self, key: str) -> Any:
        kind = self.value_type(f"key {key!r}")
        if kind is ValueType.STRING:
            return self.text(f"the value of key {key!r}", MAX_STRING_BYTES)
        if kind is ValueType.ARRAY:
            return self.array(key)
        at = self.take(SCALARS[kind].size, f"the value of key {key!r}")
        (value,) = SCALARS[kind].unpack_from(self.source, at)
        if kind is ValueType.BOOL:
            if value > 1:
                self.fail(f"key {key!r} is a boolean with the value {value}", at)
            return bool(value)
        return value

    def value_type(self, what: str) -> ValueType:
        begin = self.position
        number = self.u32(f"the type of {what}")
        try:
            return ValueType(number)
        except ValueError:
            self.fail(f"{what} has the unknown value type {number}", begin)

    def array(self, key: str) -> LazyArray:
        begin = self.position
        element = self.value_type(f"the items of key {key!r}")
        if element is ValueType.ARRAY:
            self.fail(f"key {key!r} is an array of arrays, which no model uses", begin)
        count_at = self.position
        count = self.u64(f"the length of key {key!r}")
        item_bytes = 8 if element is ValueType.STRING else SCALARS[element].size
        left = self.size - self.position
        if count > left // item_bytes:
            self.fail(f"key {key!r} claims {count} items where {left} bytes are left", count_at)
        first = self.position
        if element is ValueType.STRING:
            self.position = self.skip_strings(key, count)
        else:
            self.position += count * item_bytes
        if element is ValueType.BOOL and count:
            self.check_booleans(key, first, count)
        return LazyArray(self.source, element, count, first, self.position)

    def skip_strings(self, key: str, count: int) -> int:
        try:
            return strings.skip(self.source, self.position, count, self.size)
        except strings.BrokenStringError as broken:
            self.fail(f"item {broken.index} of key {key!r} reaches beyond the end of the file", broken.offset)

    def check_booleans(self, key: str, begin: int, count: int) -> None:
        if wrong := _NO_BOOLEAN.search(self.source, begin, begin + count):
            at = wrong.start()
            self.fail(f"item {at - begin} of key {key!r} is a boolean that is neither 0 nor 1", at)

    def tensors(self, count: int) -> dict[str, _Description]:
        """Read the descriptions; one in which anything is unusual is read anew, step by step, by who can say what."""
        found: dict[str, _Description] = {}
        for index in range(count):
            begin = self.position
            description = self.sound_tensor(begin)
            if description is None or description.name in found:
                self.position = begin
                name = self.text(f"the name of tensor {index}", MAX_NAME_BYTES)
                if name in found:
                    self.fail(f"tensor {name!r} appears twice", begin)
                description = self.tensor(name, begin)
            found[description.name] = description
        return found

    def sound_tensor(self, begin: int) -> _Description | None:
        """The description that begins here, with the position moved behind it; None when there is none without fault."""
        source = self.source
        try:
            (length,) = _U64.unpack_from(source, begin)
            if length > MAX_NAME_BYTES:
                return None
            end = begin + 8 + length
            name = source[begin + 8 : end].decode()
            (n_dims,) = _U32.unpack_from(source, end)
            rest = _DESCRIPTIONS[n_dims]
            *extents, number, offset = rest.unpack_from(source, end + 4)
            block_size, block_bytes, kind = _TYPES[number]
        except (struct.error, LookupError, UnicodeDecodeError):
            return None
        shape, n_elements = tuple(extents), math.prod(extents)
        if not 0 < n_elements < 1 << 63 or (extents and extents[0] % block_size):
            return None
        if not extents and block_size > 1:
            return None
        self.position = end + 4 + rest.size
        return _Description(name, shape, kind, offset, n_elements // block_size * block_bytes, begin)

    def tensor(self, name: str, begin: int) -> _Description:
        what = f"tensor {name!r}"
        n_dims = self.u32(f"the number of dimensions of {what}")
        if n_dims > MAX_DIMENSIONS:
            self.fail(f"{what} has {n_dims} dimensions, more than {MAX_DIMENSIONS}", begin)
        shape = tuple(self.u64(f"the shape of {what}") for _ in range(n_dims))
        number = self.u32(f"the type of {what}")
        offset = self.u64(f"the offset of {what}")
        try:
            kind = TensorType(number)
        except ValueError:
            self.fail(f"{what} has the unknown tensor type {number}", begin)
        if any(not 0 < extent < 1 << 63 for extent in shape):
            self.fail(f"{what} has the shape {shape}; every dimension must be positive", begin)
        n_elements = math.prod(shape)
        if n_elements >= 1 << 63:
            self.fail(f"{what} has the shape {shape}: its number of elements overflows", begin)
        if (shape[0] if shape else 1) % kind.block_size:
            self.fail(
                f"{what}: a row of {shape[0] if shape else 1} elements is not whole {kind.ggml_name} blocks of {kind.block_size}",
                begin,
            )
        return _Description(name, shape, kind, offset, kind.n_bytes(n_elements), begin)


def _alignment(head: _Parser, metadata: Metadata) -> int:
    value = metadata.integer("general.alignment", DEFAULT_ALIGNMENT)
    if not 0 < value <= MAX_ALIGNMENT or value & (value - 1):
        head.fail(f"key 'general.alignment' is {value}, not a power of two up to {MAX_ALIGNMENT}")
    return value


def _map(path: str | Path) -> tuple[mmap.mmap, os.stat_result]:
    try:
        # O_NONBLOCK: a named pipe must be refused, not waited for
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError as error:
        raise NotFound(f"{path}: no such file") from error
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be opened: {error.strerror}") from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise FileFormatError(f"{path}: not a regular file")
        if found.st_size == 0:
            raise FileFormatError(f"{path}: the file is empty (at byte 0)")
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), found
    finally:
        os.close(descriptor)
