"""The devices that ggml sees in this process, and the kinds of memory each offers for weights.

Those of other machines are there once they are joined: the library then holds a connection to their worker, and ends the process
where that breaks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

from puna.native import structs
from puna.native.ggml import DEVICE_TYPE_ACCEL, DEVICE_TYPE_CPU, DEVICE_TYPE_GPU, DEVICE_TYPE_IGPU, ggml
from puna.native.pages import ask_for_huge
from puna.native.rpc import connected
from puna.rpc.probe import ask_worker
from puna.rpc.protocol import endpoint_of


@dataclass(frozen=True)
class BufferType:
    address: int
    name: str
    is_host: bool


@dataclass(frozen=True)
class Device:
    address: int
    name: str
    description: str
    kind: int  # DEVICE_TYPE_*
    buffer_types: tuple[BufferType, ...]  # for weights, best first; the last is the plain one

    @property
    def is_cpu(self) -> bool:
        return self.kind == DEVICE_TYPE_CPU

    @property
    def is_gpu(self) -> bool:
        return self.kind in (DEVICE_TYPE_GPU, DEVICE_TYPE_IGPU)

    @property
    def plain(self) -> BufferType:
        return self.buffer_types[-1]

    def memory(self) -> tuple[int, int]:
        """Free and total bytes."""
        return structs.device_memory(self.address)


def _buffer_type(address: int) -> BufferType:
    g = ggml()
    return BufferType(address, g.ggml_backend_buft_name(address).decode(), bool(g.ggml_backend_buft_is_host(address)))


def _device(address: int) -> Device:
    g = ggml()
    types = [*structs.extra_buffer_types(address), g.ggml_backend_dev_buffer_type(address)]
    return Device(
        address,
        g.ggml_backend_dev_name(address).decode(),
        g.ggml_backend_dev_description(address).decode(),
        g.ggml_backend_dev_type(address),
        tuple(_buffer_type(t) for t in types),
    )


_ORDER = {DEVICE_TYPE_GPU: 0, DEVICE_TYPE_IGPU: 1, DEVICE_TYPE_ACCEL: 2, DEVICE_TYPE_CPU: 3}
_joined: dict[str, list[Device]] = {}  # by worker


def devices() -> tuple[Device, ...]:
    """Those of this machine, and of the workers that were joined; the CPU is the last."""
    joined = list(_joined.values())  # in one go: another thread may join a worker meanwhile
    found = [*_own(), *(device for worker in joined for device in worker)]
    return tuple(sorted(found, key=lambda d: _ORDER[d.kind]))


@cache
def _own() -> tuple[Device, ...]:
    g = ggml()
    found = [_device(g.ggml_backend_dev_get(i)) for i in range(g.ggml_backend_dev_count())]
    return tuple(d for d in found if d.kind in _ORDER)


def join(names: Iterable[str]) -> None:
    """Connect to the workers whose devices are among *names*, once per process.

    Errors: WorkerUnreachable, LoadError; NativeLibraryError where the library has no RPC devices.
    """
    for endpoint in dict.fromkeys(filter(None, map(endpoint_of, names))):
        if endpoint not in _joined:
            ask_worker(endpoint)
            found = [_device(address) for address in connected(endpoint)]
            # The library numbers the devices of all workers as it meets them; the name of their memory stays.
            _joined[endpoint] = [replace(device, name=device.plain.name) for device in found]


def cpu() -> Device:
    return next(d for d in _own() if d.is_cpu)


def widen_pages(buffer: int) -> None:
    """Let a new buffer of the CPU lie in huge pages, where the system has them."""
    g = ggml()
    ask_for_huge(g.ggml_backend_buffer_get_base(buffer), g.ggml_backend_buffer_get_size(buffer))
