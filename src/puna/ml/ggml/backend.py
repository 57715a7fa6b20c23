"""The tensor library behind a model: devices at work, weights, storage, graphs, and what all of it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from puna.errors import LoadError, OutOfMemory
from puna.gguf.layers import n_stored_layers
from puna.gguf.reader import GGUFFile
from puna.gguf.types import TensorType
from puna.ml.backend import LowRank, Use
from puna.ml.ggml.adapters import Adapters
from puna.ml.ggml.attention import Attention, fused, stepwise
from puna.ml.ggml.devices import Device, cpu, devices, join
from puna.ml.ggml.graph import GGMLContext
from puna.ml.ggml.joined import parts_of
from puna.ml.ggml.own_attention import OwnAttention
from puna.ml.ggml.packed import Packer
from puna.ml.ggml.packed_cache import PackedCache
from puna.ml.ggml.tensor import GGMLTensor
from puna.ml.ggml.weights import Weights
from puna.ml.tensor import DType
from puna.native import structs
from puna.native.ggml import ggml
from puna.native.kernels.library import Kernels
from puna.native.pages import zero_pages
from puna.wire import DeviceLayers, DeviceMemory, MemoryReport


class GGMLBackend:
    """Layers go to the devices that *layers* names, all others to the CPU.

    A file that is open already stays open when the backend is closed.

    *allows* may veto a special buffer type for a tensor type: ``allows("CPU_REPACK", "q4_K")``. With *kernels*, matrices are
    packed for Puna's own products where all layers are on the CPU. So many bytes of them are kept on disk: beside the file where
    it is a blob of a folder of models, and for others in the one that *models* names.
    """

    def __init__(
        self,
        file: str | Path | GGUFFile,
        *,
        n_threads: int,
        layers: Sequence[DeviceLayers] = (),
        use_mmap: bool | None = None,
        allows: Callable[[str, str], bool] = lambda _buffer_type, _tensor_type: True,
        adapters: Sequence[str | Path] = (),
        flash_attention: bool = True,
        kernels: Kernels | None = None,
        packed_cache_bytes: int = 0,
        models: Path | None = None,
    ) -> None:
        self._attend: Attention = fused if flash_attention else stepwise
        self._storage_contexts: dict[int, int] = {}  # by device
        self._storage: list[tuple[int, int, int]] = []  # layer, address, bytes
        self._abort = structs.AbortFlag()
        # Each size of graph has its scheduler, and a block for the description of its nodes that rebuilds use again.
        self._schedulers: dict[int, int] = {}
        self._arenas: dict[int, npt.NDArray[np.uint8]] = {}
        with ExitStack() as stack:  # what is open by then is closed again when a later step fails
            self.file = file if isinstance(file, GGUFFile) else stack.enter_context(GGUFFile.open(file))
            self.n_layers = n_layers = n_stored_layers(self.file.metadata)
            assignment = self._assign(layers)
            used = {d.address: d for d in assignment}
            self.devices = [d for d in devices() if d.is_cpu or d.address in used]

            # Not the method: with a circle of references the mapped file would stay until Python looks for circles.
            def device_of(layer: int) -> Device:
                return cpu() if layer < 0 else assignment[layer]

            own = kernels if kernels and all(d.is_cpu for d in assignment) else None
            self._packer = packer = Packer(own, allows, has_adapters=bool(adapters)) if own else None
            self._own_attention = OwnAttention(own, allows) if own and flash_attention else None
            if packer:
                stack.callback(packer.free)

            def place(opened: GGUFFile, cache: PackedCache | None = None) -> Weights:
                return Weights(opened, n_layers, device_of, use_mmap=use_mmap, allows=allows, packer=packer, cache=cache)

            self._device_of = device_of
            self._weights = place(self.file, PackedCache.of(self.file, models, packed_cache_bytes))
            stack.callback(self._weights.close)
            self._adapters = Adapters(adapters, self.file, place)
            stack.callback(self._adapters.close)
            self._backends = self._started(stack, n_threads)
            self._stack = stack.pop_all()

    def _assign(self, layers: Sequence[DeviceLayers]) -> list[Device]:
        """The device of each layer, the output last."""
        join(part.device for part in layers)
        assignment = [cpu()] * (self.n_layers + 1)
        known = {d.name: d for d in devices()}
        for part in layers:
            if part.device not in known:
                raise LoadError(f"there is no device {part.device}; this machine has {', '.join(known)}")
            if not 0 <= part.begin <= part.end <= self.n_layers + 1:
                raise LoadError(f"layers {part.begin}..{part.end} are not within the model's {self.n_layers + 1}")
            assignment[part.begin : part.end] = [known[part.device]] * (part.end - part.begin)
        return assignment

    def device_of(self, layer: int) -> Device:
        return self._device_of(layer)

    def _started(self, stack: ExitStack, n_threads: int) -> list[int]:
        """The devices at work, the CPU last."""
        g = ggml()
        backends: list[int] = []
        for device in self.devices:
            backend = g.ggml_backend_dev_init(device.address, None)
            if not backend:
                raise LoadError(f"device {device.name} could not be started")
            backends.append(backend)
            stack.callback(g.ggml_backend_free, backend)
        self._cpu_backend = backends[-1]
        self.set_threads(n_threads)
        g.ggml_backend_cpu_set_abort_callback(self._cpu_backend, self._abort.function, self._abort.data)
        return backends

    def set_threads(self, n_threads: int) -> None:
        ggml().ggml_backend_cpu_set_n_threads(self._cpu_backend, n_threads)

    def _scheduler_for(self, max_nodes: int) -> int:
        """One scheduler per size of graph: each holds the working memory of one allocated graph at a time."""
        if max_nodes not in self._schedulers:
            backends = structs.pointers(self._backends)
            types = structs.pointers([d.plain.address for d in self.devices])
            scheduler = ggml().ggml_backend_sched_new(backends, types, len(self._backends), max_nodes, False, True)
            self._stack.callback(ggml().ggml_backend_sched_free, scheduler)
            self._schedulers[max_nodes] = scheduler
        return self._schedulers[max_nodes]

    @property
    def taken(self) -> Set[str]:
        return self._weights.taken

    def has_tensor(self, name: str) -> bool:
        return name in self.file.tensors

    def tensor(self, name: str, use: Use) -> GGMLTensor:
        return self._weights.tensor(name, use)

    def joined(self, names: Sequence[str]) -> list[GGMLTensor] | None:
        if any(self._adapters.change(name) for name in names):
            return None
        whole = self._weights.joined(names)
        return None if whole is None else parts_of(whole, [self.file.tensors[name].shape for name in names])

    def low_rank(self, name: str, use: Use) -> Sequence[LowRank]:
        return self._adapters.of(name, use)

    def storage(self, layer: int, dtype: DType, *shape: int) -> GGMLTensor:
        g = ggml()
        device = self.device_of(layer)
        if device.address not in self._storage_contexts:
            # Keys and values of each layer, and room for what other caches keep.
            context = structs.new_context(8 * (self.n_layers + 1) * g.ggml_tensor_overhead())
            self._storage_contexts[device.address] = context
            self._stack.callback(g.ggml_free, context)
        new = (g.ggml_new_tensor_1d, g.ggml_new_tensor_2d, g.ggml_new_tensor_3d, g.ggml_new_tensor_4d)[len(shape) - 1]
        address = new(self._storage_contexts[device.address], int(dtype), *shape)
        self._storage.append((layer, address, g.ggml_backend_buft_get_alloc_size(device.plain.address, address)))
        return GGMLTensor(address)

    def read(self, tensor: Any, offset: int, out: npt.NDArray[np.uint8]) -> None:
        self._check_bytes(tensor, offset, out)
        ggml().ggml_backend_tensor_get(tensor.address, out.ctypes.data, offset, out.nbytes)

    def write(self, tensor: Any, offset: int, values: npt.NDArray[np.uint8]) -> None:
        self._check_bytes(tensor, offset, values)
        ggml().ggml_backend_tensor_set(tensor.address, values.ctypes.data, offset, values.nbytes)

    def _check_bytes(self, tensor: Any, offset: int, values: npt.NDArray[np.uint8]) -> None:
        """Where the library would end the process."""
        n_bytes = ggml().ggml_nbytes(tensor.address)
        if not (0 <= offset <= n_bytes - values.nbytes and values.flags.c_contiguous):
            raise ValueError(f"bytes {offset} to {offset + values.nbytes} of a tensor that has {n_bytes}")

    def measure(self) -> None:
        """Instead of allocate: graphs can be planned and memory() is exact, but nothing is taken."""
        g = ggml()
        self._adapters.check()
        for weights in self._all_weights:
            weights.measure()
        for layer, address, _ in self._storage:
            buffer = g.ggml_backend_buft_alloc_buffer(self.device_of(layer).plain.address, 0)
            structs.set_buffer(address, buffer)
            self._stack.callback(g.ggml_backend_buffer_free, buffer)

    def allocate(self) -> None:
        self._adapters.check()
        for weights in self._all_weights:
            weights.allocate()
        g = ggml()
        for device in self.devices:
            context = self._storage_contexts.get(device.address)
            if context is None:
                continue
            if device.is_cpu:
                self._allocate_on_host(device)
                continue
            buffer = g.ggml_backend_alloc_ctx_tensors_from_buft(context, device.plain.address)
            if not buffer:
                raise self._no_memory_for_storage(device)
            self._stack.callback(g.ggml_backend_buffer_free, buffer)
            g.ggml_backend_buffer_clear(buffer, 0)

    def _allocate_on_host(self, device: Device) -> None:
        """In pages that come from the system as zeros and take no memory until used.

        The heap would give what lay there before, and a value that is hidden from attention must still be a number.
        """
        g = ggml()
        unit = g.ggml_backend_buft_get_alignment(device.plain.address)
        places, size = [], 0
        for layer, address, n_bytes in self._storage:
            if self.device_of(layer) is device:
                places.append((address, size))
                size += -(-n_bytes // unit) * unit
        try:
            pages = np.frombuffer(zero_pages(size), np.uint8)
        except OSError as error:
            raise self._no_memory_for_storage(device) from error
        buffer = g.ggml_backend_cpu_buffer_from_ptr(pages.ctypes.data, pages.size)
        self._stack.callback(_free, buffer, pages)
        for address, offset in places:
            g.ggml_backend_tensor_alloc(buffer, address, pages.ctypes.data + offset)

    def _no_memory_for_storage(self, device: Device) -> OutOfMemory:
        wanted = sum(n for layer, _, n in self._storage if self.device_of(layer) is device)
        return OutOfMemory(f"no memory for {wanted / 1e6:.0f} MB of cache on {device.name}")

    def load(self, progress: Callable[[float], None]) -> None:
        self._adapters.load()
        self._weights.load(progress)

    @property
    def instructions(self) -> str:
        """What Puna's own products compute with; empty where ggml multiplies everything."""
        return self._packer.instructions if self._packer and self._packer.n_matrices else ""

    @property
    def tensor_types(self) -> set[TensorType]:
        """Of all tensors in the files."""
        return {tensor.type for file in (self.file, *self._adapters.files) for tensor in file.tensors.values()}

    @property
    def _all_weights(self) -> list[Weights]:
        return [self._weights, *self._adapters.weights]

    def context(self, max_nodes: int) -> GGMLContext:
        """Only one context of each size may be in use."""
        max_nodes += self._adapters.max_nodes + (self._packer.max_nodes if self._packer else 0)
        if max_nodes not in self._arenas:
            self._arenas[max_nodes] = np.empty(GGMLContext.arena_bytes(max_nodes) + 1024, np.uint8)
        scheduler, arena = self._scheduler_for(max_nodes), self._arenas[max_nodes]
        context = GGMLContext(scheduler, max_nodes, arena, self._attend, self._own_attention)
        if self._packer:
            self._packer.roundings.begin(context.address)
        return context

    def reserve_sizes(self, context: Any) -> list[int]:
        """Bytes of working memory per device that a graph needs, without taking them."""
        sizes = structs.sizes(len(self._backends))
        ggml().ggml_backend_sched_reserve_size(context.scheduler, context.graph, sizes)
        return list(sizes)

    def memory(self, graph_sizes: Sequence[int] | None = None) -> MemoryReport:
        """Bytes taken; with graph_sizes, per device, those stand for the working memory that is not allocated yet."""
        g = ggml()
        report = []
        for i, (device, backend) in enumerate(zip(self.devices, self._backends, strict=True)):
            cache = [0] * (self.n_layers + 1)
            for layer, _, n_bytes in self._storage:
                if self.device_of(layer) is device:
                    cache[layer] += n_bytes
            taken = sum(g.ggml_backend_sched_get_buffer_size(s, backend) for s in self._schedulers.values())
            graph = taken if graph_sizes is None else graph_sizes[i]
            weights = [sum(layer) for layer in zip(*(w.layer_bytes(device) for w in self._all_weights), strict=True)]
            report.append(DeviceMemory(device=device.name, weights=weights, cache=cache, graph=graph, is_gpu=device.is_gpu))
        input_weights, mapped = (sum(f(w) for w in self._all_weights) for f in (Weights.input_bytes, Weights.mapped_bytes))
        return MemoryReport(devices=report, input_weights=input_weights, mapped=mapped)

    def abort(self) -> None:
        self._abort.set()

    def clear_abort(self) -> None:
        self._abort.clear()

    def close(self) -> None:
        self._stack.close()


def _free(buffer: int, pages: npt.NDArray[np.uint8]) -> None:
    """The pages are given so that they last as long as the buffer that is about them."""
    ggml().ggml_backend_buffer_free(buffer)
    del pages
