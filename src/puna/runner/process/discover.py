"""``puna discover``: the devices of this machine as one line of JSON, a ``wire.Discovery``.

A process of its own, because opening a driver may crash or hang. The line is the last one on standard output: drivers
print, too.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Literal

from puna import settings
from puna.errors import NativeLibraryError, WorkerUnreachable
from puna.host import usable_cores
from puna.ml.ggml.devices import Device, devices
from puna.native import cpu, drivers, structs
from puna.native.ggml import DEVICE_TYPE_ACCEL, DEVICE_TYPE_CPU, DEVICE_TYPE_GPU, DEVICE_TYPE_IGPU, ggml
from puna.native.rpc import rpc
from puna.rpc.probe import ask_workers
from puna.rpc.protocol import device_name
from puna.wire import Device as FoundDevice
from puna.wire import Discovery, encode

# They are read by the drivers and by ggml's backends; runners inherit them, too.
FILTERS = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"),
    *("HSA_OVERRIDE_GFX_VERSION", "GGML_VK_VISIBLE_DEVICES", "ONEAPI_DEVICE_SELECTOR"),
)
_LIFE_S = 60  # whoever asked has given up by then, or was killed; a driver that hangs keeps no process for ever
_KINDS: dict[int, Literal["gpu", "igpu", "accel", "cpu"]] = {
    DEVICE_TYPE_GPU: "gpu",
    DEVICE_TYPE_IGPU: "igpu",
    DEVICE_TYPE_ACCEL: "accel",
    DEVICE_TYPE_CPU: "cpu",
}


def discover() -> Discovery:
    threads = cpu.threads(cpu.physical_cores(), usable_cores(), cpu.cgroup_limits().cpus)
    filters = {name: os.environ[name] for name in FILTERS if name in os.environ}
    try:
        found, error = [_describe(device) for device in devices()], ""
    except NativeLibraryError as failure:
        found, error = [], str(failure)
    workers = list(settings.load().rpc)
    remote, lost = ([], []) if error else _ask(workers)
    return Discovery(
        devices=[*found, *remote],
        filters=filters,
        error=error,
        workers=workers,
        lost=lost,
        physical_cores=cpu.physical_cores(),
        threads=threads,
    )


def _ask(workers: Sequence[str]) -> tuple[list[FoundDevice], list[str]]:
    """The devices of other machines, and why there are none of some."""
    if not workers:
        return [], []
    try:
        rpc()
    except NativeLibraryError as error:
        return [], [f"PUNA_RPC has no effect: {error}"]
    found, lost = [], []
    for worker, answer in ask_workers(workers).items():
        if isinstance(answer, WorkerUnreachable):
            lost.append(str(answer))
            continue
        for index, memory in enumerate(answer):
            name = device_name(worker, index)
            facts = {"library": "RPC", "description": f"RPC worker {worker}", "id": name}
            found.append(FoundDevice(name=name, kind="rpc", free=memory.free, total=memory.total, **facts))
    return found, lost


def _describe(device: Device) -> FoundDevice:
    g = ggml()
    free, total = device.memory()
    library = g.ggml_backend_reg_name(g.ggml_backend_dev_backend_reg(device.address)).decode(errors="replace")
    place = structs.device_id(device.address)
    facts = drivers.facts(library, place)
    return FoundDevice(
        name=device.name,
        library=library,
        kind=_KINDS[device.kind],
        free=min(free, total),
        total=total,
        description=device.description,
        id=place,
        capability=facts.capability,
        driver=facts.driver,
    )


def main() -> None:
    if hasattr(signal, "alarm"):
        signal.alarm(_LIFE_S)
    line = encode(discover())
    sys.stdout.flush()
    os.write(1, b"\n" + line + b"\n")
    os._exit(0)  # a driver that crashes while it is unloaded has already said all that is wanted
