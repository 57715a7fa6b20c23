"""What another model may take, beside those that are loaded. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from puna.host import Memory
from puna.llm.fitting import Free
from puna.llm.layout import GPU
from puna.wire import Device, MemoryReport


@dataclass(frozen=True)
class Held:
    """A loaded model: what it was given, and what it has really taken of the host's memory so far."""

    memory: MemoryReport
    private: int  # bytes of its process that are no pages of files

    @property
    def still_to_take(self) -> int:
        """Bytes of the host that are its own, yet look free: an untouched cache, and pages of the mapped file.

        The system would take such pages back for another model, and read them again and again from disk.
        """
        return max(0, self.memory.total - self.memory.on_gpus - self.private)

    def on(self, device: str) -> int:
        return sum(d.total for d in self.memory.devices if d.device == device)


def available(gpus: Sequence[Device], host: Memory, held: Sequence[Held], *, is_fresh: bool = True) -> Free:
    """*is_fresh*: the GPUs' free memory was just asked for; an old value would still count a model that has gone."""
    free_host = max(0, host.free - sum(model.still_to_take for model in held))
    found = []
    for gpu in gpus:
        promised = sum(model.on(gpu.name) for model in held)
        free = max(0, gpu.total - promised)
        if is_fresh:
            free = min(free, gpu.free)
        is_integrated = gpu.kind == "igpu"
        room = min(free, free_host) if is_integrated else free
        found.append(GPU(gpu.name, gpu.library, room, is_integrated, is_remote=gpu.kind == "rpc"))
    return Free(tuple(found), free_host, host.swap_free)
