"""A model file's tensors in memory: where each goes, how many bytes that takes, and reading them.

A tensor that may stay as the file has it is a page of the mapped file, unless the file is small: then it is read into
huge pages. A matrix that the CPU multiplies faster in another order (Puna's own, or the buffer types AMX and CPU_REPACK)
is converted while it is read, so it is a copy. Tensors of layers on a GPU are copied there.
"""

from __future__ import annotations

import logging
import mmap
import re
from collections.abc import Callable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from puna.errors import LoadError, MissingTensors, OutOfMemory
from puna.gguf.reader import GGUFFile, TensorInfo
from puna.ml.backend import Use
from puna.ml.ggml.devices import BufferType, Device, cpu, widen_pages
from puna.ml.ggml.packed import Packer
from puna.ml.ggml.packed_cache import Bytes, Entry, PackedCache
from puna.ml.ggml.support import four, supports
from puna.ml.ggml.tensor import GGMLTensor
from puna.native import structs
from puna.native.ggml import BUFFER_USAGE_WEIGHTS, ggml
from puna.native.pages import ask_for_huge, can_be_huge, zero_pages

log = logging.getLogger(__name__)

INPUT = -1  # the pseudo-layer of tensors that stay with the host: token embeddings

# Loading converts; two readers keep two cores busy without much memory traffic between them.
_READERS = 2
_CHUNK_BYTES = 8 << 20


# A file of at most so many bytes is read rather than mapped. A step of a small model is short, so that looking up pages
# is a part of it (docs/measurements.md); with larger ones nothing was seen, and reading them takes seconds.
SMALL_FILE_BYTES = 512 << 20

# Joined matrices of at most so many bytes are worth a copy of what would otherwise stay in the mapped file.
_SMALL_BYTES = 4 << 20


@dataclass(eq=False)
class Weight:
    parts: tuple[TensorInfo, ...]  # of the file; several: their rows one after another
    use: Use
    layer: int
    buffer_type: BufferType
    tensor: GGMLTensor
    is_mapped: bool
    n_bytes: int  # in memory, with the buffer type's padding

    @property
    def address(self) -> int:
        return self.tensor.address

    @property
    def file_bytes(self) -> int:
        return sum(part.n_bytes for part in self.parts)


def layer_of(name: str, n_layers: int) -> int:
    """The layer whose device a tensor goes to; INPUT for what is looked up before the first layer."""
    match = re.match(r"blk\.(\d+)\.", name)
    if match:
        return int(match.group(1))
    return INPUT if name.startswith(("token_embd", "position_embd", "token_types")) else n_layers


class Weights:
    """Ask for tensors, then allocate, then read; all in this order, once."""

    def __init__(
        self,
        file: GGUFFile,
        n_layers: int,
        device_of: Callable[[int], Device],
        *,
        use_mmap: bool | None,
        allows: Callable[[str, str], bool],
        packer: Packer | None = None,
        cache: PackedCache | None = None,
    ) -> None:
        """*use_mmap* None: only where the file is not small, or the system has no huge pages for what is read.

        With a *packer*, matrices on the CPU are packed for Puna's own products where those take them, and with a *cache* kept
        that way.
        """
        self._file = file
        self._n_layers = n_layers
        self._device_of = device_of
        self._use_mmap = use_mmap if use_mmap is not None else file.size > SMALL_FILE_BYTES or not can_be_huge()
        self._allows = allows
        self._packer = packer
        self._cache = cache
        self._packed_data: Bytes | None = None
        self._is_kept = False  # packed matrices are mapped as an earlier load has kept them
        self._contexts: dict[tuple[BufferType, bool], int] = {}
        self._weights: dict[tuple[str, Use], Weight] = {}
        self._scratch = structs.new_context(1 << 20)
        self._stack = ExitStack()
        self._stack.callback(ggml().ggml_free, self._scratch)
        self._is_allocated = False

    @property
    def taken(self) -> Set[str]:
        """The names of the tensors that were asked for."""
        return {part.name for weight in self._weights.values() for part in weight.parts}

    def tensor(self, name: str, use: Use) -> GGMLTensor:
        """A tensor of the file."""
        key = (name, use)
        if key not in self._weights:
            if name not in self._file.tensors:
                raise MissingTensors([name])
            self._weights[key] = self._place(self._file.tensors[name], use)
        return self._weights[key].tensor

    def joined(self, names: Sequence[str]) -> GGMLTensor | None:
        """One matrix with the rows of all, or None where they are better or necessarily apart."""
        parts = tuple(self._file.tensors[name] for name in names)
        first = parts[0]
        is_uniform = all(p.type is first.type and len(p.shape) == 2 and p.shape[0] == first.shape[0] for p in parts)
        if not is_uniform or any((name, Use.MATRIX) in self._weights for name in names):
            return None
        layer = layer_of(first.name, self._n_layers)
        if not 0 <= layer < self._n_layers:
            return None
        device = self._device_of(layer)
        if self._packer and device.is_cpu and all(self._packer.takes(part, Use.MATRIX, is_tied=False) for part in parts):
            return None  # they are multiplied together wherever they lie
        whole = replace(first, shape=(first.shape[0], sum(p.shape[1] for p in parts)))
        buffer_type = self._best(device, whole, Use.MATRIX)
        stays_mapped = self._use_mmap and buffer_type is device.plain and buffer_type.is_host
        if stays_mapped and sum(p.n_bytes for p in parts) > _SMALL_BYTES:
            return None
        weight = self._described(parts, whole, Use.MATRIX, layer, buffer_type, is_mapped=False)
        self._weights[first.name, Use.MATRIX] = weight
        return weight.tensor

    def _place(self, info: TensorInfo, use: Use) -> Weight:
        # Rope factors are vectors that every layer reads; they are small, so the output's device holds them.
        layer = INPUT if use is Use.ROWS else layer_of(info.name, self._n_layers)
        if layer == INPUT and use is Use.MATRIX:
            layer = self._n_layers  # a tied head: the embedding table again, as a matrix
        if layer > self._n_layers:
            raise LoadError(f"{self._file.path}: tensor {info.name} belongs to a layer beyond the {self._n_layers} of the model")
        device = self._device_of(layer)
        buffer_type = self._best(device, info, use)
        for other in Use:
            known = self._weights.get((info.name, other))
            if known and known.parts == (info,) and known.buffer_type is buffer_type:
                return known  # a second use of the same bytes in the same memory
        is_mapped = self._use_mmap and buffer_type is device.plain and buffer_type.is_host
        return self._described((info,), info, use, layer, buffer_type, is_mapped)

    def _described(
        self,
        parts: tuple[TensorInfo, ...],
        whole: TensorInfo,
        use: Use,
        layer: int,
        buffer_type: BufferType,
        is_mapped: bool,
    ) -> Weight:
        tensor = self._describe(buffer_type, is_mapped, whole)
        n_bytes = ggml().ggml_backend_buft_get_alloc_size(buffer_type.address, tensor.address)
        return Weight(parts, use, layer, buffer_type, tensor, is_mapped, n_bytes)

    def _best(self, device: Device, info: TensorInfo, use: Use) -> BufferType:
        if self._packer and device.is_cpu and self._packer.takes(info, use, is_tied=self._is_tied(info)):
            return self._packer.buffer_type
        for buffer_type in device.buffer_types:
            plain = buffer_type is device.plain
            if not plain and not self._allows(buffer_type.name, info.type.ggml_name):
                continue
            if supports(self._scratch, device, buffer_type, info, use):
                return buffer_type
        raise LoadError(f"{self._file.path}: {device.name} cannot compute with tensor {info.name} of type {info.type.name}")

    def _is_tied(self, info: TensorInfo) -> bool:
        """Whether it is the table of embeddings and, there being no other, the output's matrix too."""
        return info.name == "token_embd.weight" and "output.weight" not in self._file.tensors

    def _describe(self, buffer_type: BufferType, is_mapped: bool, info: TensorInfo) -> GGMLTensor:
        g = ggml()
        key = (buffer_type, is_mapped)
        if key not in self._contexts:
            # Every tensor of the file may be described here, and twice when it has two uses.
            self._contexts[key] = structs.new_context(2 * len(self._file.tensors) * g.ggml_tensor_overhead() + 4096)
            self._stack.callback(g.ggml_free, self._contexts[key])
        tensor: GGMLTensor
        if self._packer and buffer_type is self._packer.buffer_type:
            matrix = self._packer.matrix(self._packer.describe(self._contexts[key], info), info)
            self._stack.callback(matrix.free)
            tensor = matrix
        else:
            tensor = GGMLTensor(g.ggml_new_tensor_4d(self._contexts[key], int(info.type), *four(info.shape)))
        g.ggml_set_name(tensor.address, info.name.encode()[:63])
        return tensor

    def measure(self) -> None:
        """Give every tensor an empty buffer of its type: enough to plan graphs, nothing is allocated."""
        g = ggml()
        for weight in self._placed():
            buffer = g.ggml_backend_buft_alloc_buffer(weight.buffer_type.address, 0)
            g.ggml_backend_buffer_set_usage(buffer, BUFFER_USAGE_WEIGHTS)
            structs.set_buffer(weight.address, buffer)
            self._stack.callback(g.ggml_backend_buffer_free, buffer)

    def allocate(self) -> None:
        """Errors: OutOfMemory with the bytes that were asked for."""
        g = ggml()
        for (buffer_type, is_mapped), context in self._contexts.items():
            if is_mapped:
                self._map(context)
                continue
            if self._packer and buffer_type is self._packer.buffer_type:
                self._allocate_packed(self._packer)
                continue
            buffer = g.ggml_backend_alloc_ctx_tensors_from_buft(context, buffer_type.address)
            if not buffer:
                wanted = sum(w.n_bytes for w in self._placed() if w.buffer_type is buffer_type and not w.is_mapped)
                raise OutOfMemory(f"no memory for {wanted / 1e6:.0f} MB of weights in {buffer_type.name}")
            if any(buffer_type.address == known.address for known in cpu().buffer_types):
                widen_pages(buffer)
            g.ggml_backend_buffer_set_usage(buffer, BUFFER_USAGE_WEIGHTS)
            self._stack.callback(g.ggml_backend_buffer_free, buffer)
        self._is_allocated = True

    def _map(self, context: int) -> None:
        g = ggml()
        pages = np.frombuffer(self._mapped, dtype=np.uint8)
        base = pages.ctypes.data
        buffer = g.ggml_backend_cpu_buffer_from_ptr(base, pages.size)
        g.ggml_backend_buffer_set_usage(buffer, BUFFER_USAGE_WEIGHTS)
        self._stack.callback(g.ggml_backend_buffer_free, buffer)
        for weight in self._placed():
            if weight.is_mapped:
                g.ggml_backend_tensor_alloc(buffer, weight.address, base + weight.parts[0].offset)

    def _entries(self, packed: Sequence[Weight]) -> list[Entry]:
        entries, offset = [], 0
        for weight in packed:
            names, shape = tuple(part.name for part in weight.parts), weight.tensor.shape
            entries.append(Entry(names, weight.parts[0].type.ggml_name, shape, offset, weight.n_bytes))
            offset += weight.n_bytes
        return entries

    def _allocate_packed(self, packer: Packer) -> None:
        """Errors: OutOfMemory."""
        packed = self._packed(packer)
        entries = self._entries(packed)
        n_bytes = sum(entry.n_bytes for entry in entries)
        source = np.frombuffer(self._mapped, np.uint8).ctypes.data  # first: there may be no cache for what was opened here

        def is_sound(data: Bytes) -> bool:
            return all(
                packer.is_of(source, weight.parts, data.ctypes.data + entry.offset)
                for weight, entry in zip(packed, entries, strict=True)
            )

        data = self._cache.find(entries, is_sound) if self._cache else None
        self._is_kept = data is not None
        if data is None:
            try:
                data = np.frombuffer(zero_pages(n_bytes), np.uint8)
            except OSError as error:
                raise OutOfMemory(f"no memory for {n_bytes / 1e6:.0f} MB of packed weights") from error
            ask_for_huge(data.ctypes.data, n_bytes)
        self._packed_data = data
        g = ggml()
        buffer = g.ggml_backend_cpu_buffer_from_ptr(data.ctypes.data, n_bytes)
        g.ggml_backend_buffer_set_usage(buffer, BUFFER_USAGE_WEIGHTS)
        self._stack.callback(g.ggml_backend_buffer_free, buffer)
        for weight, entry in zip(packed, entries, strict=True):
            g.ggml_backend_tensor_alloc(buffer, weight.address, data.ctypes.data + entry.offset)

    @cached_property
    def _mapped(self) -> mmap.mmap:
        with open(self._file.path, "rb") as source:
            if self._cache and not self._cache.is_of(source.fileno()):
                self._cache = None
            return mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ)

    def load(self, progress: Callable[[float], None]) -> None:
        """Read every tensor that is not mapped; progress is the share of bytes read, 0 to 1.

        Errors: LoadError when the file shrank since it was checked.
        """
        pages = np.frombuffer(self._mapped, dtype=np.uint8)
        placed = self._placed()
        kept = set(self._packed(self._packer)) if self._packer and self._is_kept else set()
        copied = [w for w in placed if not w.is_mapped and w not in kept]
        total = sum(w.file_bytes for w in copied) or 1
        if Path(self._file.path).stat().st_size < self._file.size:
            raise LoadError(f"{self._file.path} became shorter while it was being loaded")
        done = 0
        with ThreadPoolExecutor(_READERS, "load") as pool:
            for n_bytes in pool.map(lambda w: self._copy(w, pages), copied):
                done += n_bytes
                progress(done / total)
        with suppress(AttributeError, OSError, ValueError):
            # What was copied will not be read again through the mapping: let the system have those pages back.
            mapped = {part.name for weight in placed if weight.is_mapped for part in weight.parts}
            for part in (part for weight in copied for part in weight.parts):
                begin = -(-part.offset // mmap.PAGESIZE) * mmap.PAGESIZE
                length = part.offset + part.n_bytes - begin
                if length > 0 and part.name not in mapped:
                    self._mapped.madvise(mmap.MADV_DONTNEED, begin, length)
        progress(1.0)
        if self._cache and self._packer and self._packed_data is not None and not self._is_kept:
            self._stack.callback(self._cache.close)
            self._cache.keep(self._entries(self._packed(self._packer)), self._packed_data)

    def _copy(self, weight: Weight, pages: npt.NDArray[np.uint8]) -> int:
        g = ggml()
        if self._packer and weight.buffer_type is self._packer.buffer_type:
            self._packer.pack(pages.ctypes.data, weight.parts, weight.address)
            return weight.file_bytes
        if weight.buffer_type is self._device_of(weight.layer).plain:
            target = 0
            for part in weight.parts:
                for begin in range(0, part.n_bytes, _CHUNK_BYTES):
                    source, n_bytes = pages.ctypes.data + part.offset + begin, min(_CHUNK_BYTES, part.n_bytes - begin)
                    g.ggml_backend_tensor_set(weight.address, source, target + begin, n_bytes)
                target += part.n_bytes
            return target
        # A conversion needs the whole tensor at once.
        rows = [pages[part.offset : part.offset + part.n_bytes] for part in weight.parts]
        whole = rows[0] if len(rows) == 1 else _joined(rows)
        g.ggml_backend_tensor_set(weight.address, whole.ctypes.data, 0, whole.size)
        return int(whole.size)

    def _packed(self, packer: Packer) -> list[Weight]:
        return [w for w in self._placed() if w.buffer_type is packer.buffer_type]

    def _placed(self) -> Sequence[Weight]:
        return list({w.address: w for w in self._weights.values()}.values())

    def layer_bytes(self, device: Device) -> list[int]:
        """Bytes per layer on a device, the output last; INPUT is not counted here."""
        sizes = [0] * (self._n_layers + 1)
        for weight in self._placed():
            if weight.layer != INPUT and self._device_of(weight.layer) is device:
                sizes[weight.layer] += weight.n_bytes
        return sizes

    def input_bytes(self) -> int:
        return sum(w.n_bytes for w in self._placed() if w.layer == INPUT)

    def mapped_bytes(self) -> int:
        return sum(w.n_bytes for w in self._placed() if w.is_mapped)

    def close(self) -> None:
        self._stack.close()
        self._packed_data = None
        self._weights.clear()


def _joined(rows: Sequence[npt.NDArray[np.uint8]]) -> npt.NDArray[np.uint8]:
    """One after the other, in memory that the system gets back when it is dropped; the heap of a thread would keep it."""
    block = np.frombuffer(mmap.mmap(-1, sum(row.size for row in rows)), np.uint8)
    return np.concatenate(rows, out=block)
