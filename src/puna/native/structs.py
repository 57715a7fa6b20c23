"""Read and write fields of a ggml_tensor through its address, for callers that do not speak ctypes."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Any

from puna.native.ggml import ggml, ggml_backend_dev_props, ggml_init_params, ggml_tensor


def shape(tensor: int) -> tuple[int, int, int, int]:
    n0, n1, n2, n3 = ggml_tensor.from_address(tensor).ne
    return n0, n1, n2, n3


def strides(tensor: int) -> tuple[int, int, int, int]:
    """Bytes between neighbours along each axis."""
    b0, b1, b2, b3 = ggml_tensor.from_address(tensor).nb
    return b0, b1, b2, b3


def type_of(tensor: int) -> int:
    return int(ggml_tensor.from_address(tensor).type)


def data_of(tensor: int) -> int:
    """Where the tensor's bytes are; 0 while it has no memory."""
    return ggml_tensor.from_address(tensor).data or 0


def place_of(tensor: int) -> tuple[int, int]:
    """The tensor whose memory this one is in, itself or what it is a view of, and how many bytes from its begin."""
    fields = ggml_tensor.from_address(tensor)
    return (fields.view_src, fields.view_offs) if fields.view_src else (tensor, 0)


def buffer_of(tensor: int) -> int:
    return ggml_tensor.from_address(tensor).buffer or 0


def set_buffer(tensor: int, buffer: int | None) -> None:
    """Pretend the tensor lives in a buffer: what a device supports may depend on where the operands are."""
    ggml_tensor.from_address(tensor).buffer = buffer


def new_context(mem_bytes: int, mem: int | None = None) -> int:
    """A ggml context that holds tensors' descriptions but no data; in *mem* when given."""
    context: int | None = ggml().ggml_init(ggml_init_params(mem_bytes, mem, True))
    if not context:
        raise MemoryError(f"ggml_init failed for {mem_bytes} bytes")
    return context


def device_memory(device: int) -> tuple[int, int]:
    """Free and total bytes of a device."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    ggml().ggml_backend_dev_memory(device, ctypes.addressof(free), ctypes.addressof(total))
    return free.value, total.value


def device_id(device: int) -> str:
    """Where the device sits (``0000:c1:00.0``), the same in every library that drives it; empty if that is not known."""
    props = ggml_backend_dev_props()
    ggml().ggml_backend_dev_get_props(device, ctypes.addressof(props))
    return (props.device_id or b"").decode(errors="replace")


def extra_buffer_types(device: int) -> list[int]:
    """Buffer types beyond the default one that a device's backend offers, best first (AMX, CPU_REPACK)."""
    g = ggml()
    registry = g.ggml_backend_dev_backend_reg(device)
    address = g.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
    if not address:
        return []
    function = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)
    found = function(device)
    types: list[int] = []
    while found and found[len(types)]:
        types.append(found[len(types)])
    return types


def is_on_host(tensor: int) -> bool:
    """Whether the tensor's values can be read and written where they are. False while it has no memory."""
    buffer = ggml_tensor.from_address(tensor).buffer
    return bool(buffer) and bool(ggml().ggml_backend_buffer_is_host(buffer))


def memory(tensor: int, n_bytes: int) -> memoryview:
    """The bytes of a tensor on the host, to be written; the tensor's buffer must outlive the view."""
    data: Any = (ctypes.c_uint8 * n_bytes).from_address(ggml_tensor.from_address(tensor).data)
    return memoryview(data).cast("B")


def pointers(values: Sequence[int | None]) -> Any:
    """A C array of pointers; pass it where a pointer is expected and keep it alive as long as C needs it."""
    return (ctypes.c_void_p * len(values))(*values)


def ints(values: Sequence[int]) -> Any:
    """A C array of int; as pointers."""
    return (ctypes.c_int32 * len(values))(*values)


def sizes(count: int) -> Any:
    """A zeroed C array of size_t."""
    return (ctypes.c_size_t * count)()


class AbortFlag:
    """A switch that ggml polls between the nodes of a graph, without entering Python.

    ggml asks a C function ``bool f(void *data)``. The C library's ``strlen`` is one: on a buffer whose first byte is
    zero it returns 0, and otherwise a number from 1 to 1. A Python callback would take the interpreter's lock for
    each of the thousands of nodes.
    """

    def __init__(self) -> None:
        self._buffer = ctypes.create_string_buffer(2)
        libc = ctypes.CDLL("msvcrt" if sys.platform == "win32" else None)
        self.function: int = ctypes.cast(libc.strlen, ctypes.c_void_p).value or 0
        self.data: int = ctypes.addressof(self._buffer)

    def set(self) -> None:
        self._buffer[0] = b"\x01"

    def clear(self) -> None:
        self._buffer[0] = b"\x00"

    def __bool__(self) -> bool:
        return self._buffer[0] != b"\x00"
