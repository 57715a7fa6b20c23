"""A machine of any size, whose models take what they report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from puna import host, wire
from puna.llm.discovery import Machine


@dataclass
class FakeMachine(Machine):
    free: int = 1 << 40  # of the host, in bytes
    devices: list[wire.Device] = field(default_factory=list)
    taken: Callable[[], dict[str, int]] = dict  # bytes by device, "CPU" for the host
    knows_gpus: bool = True  # whether they tell their free memory
    n_refreshed: int = 0
    lost_workers: list[str] = field(default_factory=list)
    limits: dict[str, int] = field(default_factory=dict)  # what other programs leave free on GPUs

    @property
    def gpus(self) -> list[wire.Device]:
        return self.devices

    @property
    def lost(self) -> list[str]:
        return self.lost_workers

    async def look(self) -> wire.Discovery:
        return wire.Discovery(devices=self.devices)

    async def refresh(self) -> bool:
        self.n_refreshed += 1
        if self.knows_gpus:
            taken = self.taken()
            free = {d.name: min(self.limits.setdefault(d.name, d.free), d.total - taken.get(d.name, 0)) for d in self.devices}
            self.devices = [msgspec.structs.replace(d, free=free[d.name]) for d in self.devices]
        return self.knows_gpus

    def memory(self) -> host.Memory:
        return host.Memory(1 << 40, self.free - self.taken().get("CPU", 0), 0)


def gpu(name: str, total: int, *, free: int | None = None, library: str = "CUDA", is_integrated: bool = False) -> wire.Device:
    free = total if free is None else free
    return wire.Device(name=name, library=library, kind="igpu" if is_integrated else "gpu", free=free, total=total)
