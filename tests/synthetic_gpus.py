"""GPUs for tests: devices whose memory only they can reach, computed with the CPU's kernels.

To the tensor library they are devices like any other: they have a library of their own ("SIM"), their own kind of memory
that is not the host's, of a limited size that all processes share, and a backend. So layers really are copied to them,
caches live on them, graphs are cut where the device changes and results are copied across. What they do not have is what
only hardware has: kernels of its own, memory that a driver moves about, copies that overlap with work.

``python -m tests.synthetic_gpus runner …`` and ``… discover`` are puna's with the devices of SYNTHETIC_GPUS, a comma list
of ``name:MiB``, for integrated ones ``name:MiB:i``, and for those that really have less ``name:MiB:really=MiB``. Further
words: ``library=CUDA`` for the name of another library, ``at=0000-c1-00.0`` for a place on the bus (``-`` for ``:``), and
``crash=start`` (``alloc``, ``write``, ``compute``) for a driver that ends the process when a backend is made, memory is
taken, a weight is written or a graph is computed; with ``crash=open`` it does so at once, unless CUDA_VISIBLE_DEVICES is -1:
then it shows no device.
SYNTHETIC_GPUS_FOLDER is where processes note what they have taken.

The structs are those of ggml-backend-impl.h, ggml 0.25.3.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import psutil

from puna.native.ggml import DEVICE_TYPE_CPU, DEVICE_TYPE_GPU, DEVICE_TYPE_IGPU, ggml
from puna.native.library import opened

P, Z = ctypes.c_void_p, ctypes.c_size_t
_IS_0_25 = opened().version.startswith("0.25.")


def _pointers(*names: str) -> list[tuple[str, Any]]:
    return [(name, P) for name in names]


class DeviceStruct(ctypes.Structure):
    _fields_ = _pointers(
        *("get_name", "get_description", "get_memory", "get_type", "get_props", "init_backend", "get_buffer_type"),
        *("get_host_buffer_type", "buffer_from_host_ptr", "supports_op", "supports_buft", "offload_op"),
        *("event_new", "event_free", "event_synchronize", "reg", "context"),
    )


class BufferTypeStruct(ctypes.Structure):
    # Since ggml 0.26 a backend may be asked for room for several tensors at once.
    _fields_ = _pointers(
        *("get_name", "alloc_buffer", *(() if _IS_0_25 else ("alloc_buffer_n",)), "get_alignment", "get_max_size"),
        *("get_alloc_size", *(() if _IS_0_25 else ("get_alloc_size_n",)), "is_host", "device", "context"),
    )


class BufferStruct(ctypes.Structure):
    _fields_ = _pointers(
        *("free_buffer", "get_base", "init_tensor", "memset_tensor", "set_tensor", "get_tensor", "set_tensor_2d"),
        *("get_tensor_2d", "cpy_tensor", "clear", "reset", "buft"),
    )


class BackendStruct(ctypes.Structure):
    _fields_ = _pointers(
        *("guid", "get_name", "free", "set_tensor_async", "get_tensor_async", "set_tensor_2d_async", "get_tensor_2d_async"),
        *("cpy_tensor_async", "synchronize", "graph_plan_create", "graph_plan_free", "graph_plan_update"),
        *("graph_plan_compute", "graph_compute", "event_record", "event_wait", "graph_optimize", "device"),
    )


class RegStruct(ctypes.Structure):
    _fields_ = [
        ("api_version", ctypes.c_int),
        *_pointers("get_name", "get_device_count", "get_device", "get_proc_address", "context"),
    ]


class PropsStruct(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("description", ctypes.c_char_p),
        ("memory_free", Z),
        ("memory_total", Z),
        ("type", ctypes.c_int32),
        ("device_id", ctypes.c_char_p),
    ]


NAME = ctypes.CFUNCTYPE(P, P)
ALLOC = ctypes.CFUNCTYPE(P, P, Z)
SIZE = ctypes.CFUNCTYPE(Z, P)
FREE = ctypes.CFUNCTYPE(None, P)
MEMORY = ctypes.CFUNCTYPE(None, P, P, P)
PROPS = ctypes.CFUNCTYPE(None, P, P)
INIT = ctypes.CFUNCTYPE(P, P, ctypes.c_char_p)
ASKS = ctypes.CFUNCTYPE(ctypes.c_bool, P, P)
KIND = ctypes.CFUNCTYPE(ctypes.c_int, P)
IS_HOST = ctypes.CFUNCTYPE(ctypes.c_bool, P)
WRITE = ctypes.CFUNCTYPE(None, P, P, P, Z, Z)

CRASH = b"SIM error: an illegal memory access was encountered\n"


class SyntheticGPU:
    """One device of this process. Its memory is the host's, but the library is told that the host cannot reach it."""

    def __init__(
        self,
        name: str,
        total: int,
        folder: Path,
        *,
        is_integrated: bool = False,
        really: int | None = None,
        library: str = "SIM",
        place: str = "",
        crash: str = "",
    ) -> None:
        self.name, self.total, self._folder = name.encode(), total, folder
        self._library, self._place, self._crash = library.encode(), place.encode() or None, crash
        self._hidden = 0 if really is None else total - really  # free only until somebody wants it
        self.kind = DEVICE_TYPE_IGPU if is_integrated else DEVICE_TYPE_GPU
        self._text = {key: ctypes.create_string_buffer(key) for key in (self.name, self._library, b"synthetic GPU")}
        self._sizes: dict[int, int] = {}  # of buffers, by address
        self._cpu = next(
            d for d in map(ggml().ggml_backend_dev_get, range(ggml().ggml_backend_dev_count()))
            if ggml().ggml_backend_dev_type(d) == DEVICE_TYPE_CPU
        )  # fmt: skip
        self._host = BufferTypeStruct.from_address(ggml().ggml_backend_cpu_buffer_type())
        self._free_on_host: Any = None
        self._kept: list[Any] = []  # callbacks live as long as the library may call them
        self.reg = RegStruct(api_version=2, get_name=self._says(NAME, lambda _: self._at(self._library)))
        self.buffer_type = BufferTypeStruct(
            get_name=self._says(NAME, lambda _: self._at(self.name)),
            alloc_buffer=self._says(ALLOC, lambda _, size: self._allocate(size)),
            get_alignment=self._host.get_alignment,
            is_host=self._says(IS_HOST, lambda _: False),
        )
        self.device = DeviceStruct(
            get_name=self._says(NAME, lambda _: self._at(self.name)),
            get_description=self._says(NAME, lambda _: self._at(b"synthetic GPU")),
            get_memory=self._says(MEMORY, self._tell_memory),
            get_type=self._says(KIND, lambda _: self.kind),
            get_props=self._says(PROPS, self._tell_props),
            init_backend=self._says(INIT, lambda _, __: self._start()),
            get_buffer_type=self._says(NAME, lambda _: ctypes.addressof(self.buffer_type)),
            supports_op=self._says(ASKS, lambda _, op: ggml().ggml_backend_dev_supports_op(self._cpu, op)),
            supports_buft=self._says(ASKS, lambda _, kind: kind == ctypes.addressof(self.buffer_type)),
            reg=ctypes.addressof(self.reg),
        )
        self.buffer_type.device = ctypes.addressof(self.device)
        register = opened()._short["ggml"].ggml_backend_device_register
        register.argtypes, register.restype = [P], None
        register(ctypes.addressof(self.device))

    def _says(self, kind: Any, function: Any) -> int:
        self._kept.append(kind(function))
        return ctypes.cast(self._kept[-1], P).value or 0

    def _at(self, text: bytes) -> int:
        return ctypes.addressof(self._text[text])

    def _crash_if(self, where: str) -> None:
        if self._crash == where:
            os.write(2, CRASH)
            os.abort()

    def _start(self) -> int:
        self._crash_if("start")
        init = opened()._short["ggml-cpu"].ggml_backend_cpu_init
        init.restype = P
        backend: int = init()
        ggml().ggml_backend_cpu_set_n_threads(backend, 1)
        struct = BackendStruct.from_address(backend)
        struct.device = ctypes.addressof(self.device)
        if self._crash == "compute":
            struct.graph_compute = self._says(FREE, lambda _: self._crash_if("compute"))
        return backend

    def _allocate(self, size: int) -> int | None:
        self._crash_if("alloc")
        if size > self.free() - self._hidden:
            return None
        buffer: int = ggml().ggml_backend_buft_alloc_buffer(ggml().ggml_backend_cpu_buffer_type(), size)
        struct = BufferStruct.from_address(buffer)
        self._free_on_host = self._free_on_host or FREE(struct.free_buffer)
        struct.buft = ctypes.addressof(self.buffer_type)
        struct.free_buffer = self._says(FREE, self._release)
        if self._crash == "write":
            struct.set_tensor = self._says(WRITE, lambda *_: self._crash_if("write"))
        self._sizes[buffer] = size
        self._note()
        return buffer

    def _release(self, buffer: int) -> None:
        del self._sizes[buffer]
        self._note()
        self._free_on_host(buffer)

    def _note(self) -> None:
        """Whole, for others may read it at any moment."""
        name = f"{self.name.decode()}.{os.getpid()}"
        whole = self._folder / f"new-{name}"
        whole.write_text(str(sum(self._sizes.values())))
        whole.replace(self._folder / name)

    def free(self) -> int:
        """Less what all processes that live have noted."""
        taken = 0
        for note in self._folder.glob(f"{self.name.decode()}.*"):
            if psutil.pid_exists(int(note.suffix[1:])):
                taken += int(note.read_text() or 0)
        return max(0, self.total - taken)

    def _tell_memory(self, _: int, free: int, total: int) -> None:
        Z.from_address(free).value, Z.from_address(total).value = self.free(), self.total

    def _tell_props(self, _: int, props: int) -> None:
        struct = PropsStruct.from_address(props)
        struct.memory_free, struct.memory_total, struct.type, struct.device_id = self.free(), self.total, self.kind, self._place


def from_environment() -> list[SyntheticGPU]:
    folder = Path(os.environ["SYNTHETIC_GPUS_FOLDER"])
    found = []
    for text in os.environ["SYNTHETIC_GPUS"].split(","):
        name, mebibytes, *rest = text.split(":")
        given = dict(word.split("=") for word in rest if word != "i")
        if given.get("crash") == "open":
            if os.environ.get("CUDA_VISIBLE_DEVICES") != "-1":
                os.write(2, CRASH)
                os.abort()
            continue
        found.append(
            SyntheticGPU(
                name,
                int(mebibytes) << 20,
                folder,
                is_integrated="i" in rest,
                really=int(given["really"]) << 20 if "really" in given else None,
                library=given.get("library", "SIM"),
                place=given.get("at", "").replace("-", ":"),
                crash=given.get("crash", ""),
            )
        )
    return found


if __name__ == "__main__":
    from puna.__main__ import main

    devices = from_environment()
    main()
