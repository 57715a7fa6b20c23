"""How much memory this process, and those it starts, may still take: the machine's, or less where a control group says so;
and on how many cores they may run.

Knows nothing of models. Control groups of both versions are read; a limit on any level above this process counts. Pages
of files count as free wherever they do: the system takes them back when it needs them.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import psutil

MEMBERSHIP, MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Memory:
    """Bytes."""

    total: int
    free: int
    swap_free: int


def memory(membership: Path = MEMBERSHIP, mount: Path = MOUNT) -> Memory:
    machine, swap = psutil.virtual_memory(), psutil.swap_memory()
    total, free = machine.total, machine.available
    for limit, used in _limits(membership, mount):
        total, free = min(total, limit), min(free, max(0, limit - used))
    return Memory(total, free, swap.free)


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def private_bytes(pid: int) -> int:
    """What a process holds in memory that is no page of a file; 0 when it is gone.

    Pages that nothing was written to take no memory and are not counted.
    """
    try:
        info = psutil.Process(pid).memory_info()
    except psutil.Error:
        return 0
    return max(0, info.rss - getattr(info, "shared", 0))


def control_groups(membership: Path = MEMBERSHIP, mount: Path = MOUNT, controller: str = "") -> list[Path]:
    """The folders of this process's control group and all above it; of version 1 when a *controller* is named."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    pattern = rf"\d+:(?:[^:]*,)?{controller}(?:,[^:]*)?:(.*)" if controller else "0::(.*)"
    path = next((match.group(1) for line in lines if (match := re.fullmatch(pattern, line))), None)
    if path is None:
        return []
    root = mount / controller
    group = root / path.lstrip("/")
    # Inside a container the path may be the host's, where only the mount's own root is visible.
    return [level for level in (group, *group.parents) if level == root or root in level.parents]


def _limits(membership: Path, mount: Path) -> list[tuple[int, int]]:
    """Limit and use of each control group that limits memory; what the system can take back is not used."""
    found = []
    for level in control_groups(membership, mount):
        cached = _table(level / "memory.stat")
        reclaimable = cached.get("file", 0) - cached.get("shmem", 0) + cached.get("slab_reclaimable", 0)
        found.append((_number(level / "memory.max"), _number(level / "memory.current"), reclaimable))
    for level in control_groups(membership, mount, "memory"):
        cached = _table(level / "memory.stat")
        reclaimable = cached.get("total_inactive_file", 0) + cached.get("total_active_file", 0)
        found.append((_number(level / "memory.limit_in_bytes"), _number(level / "memory.usage_in_bytes"), reclaimable))
    return [(limit, max(0, used - cached)) for limit, used, cached in found if limit is not None and used is not None]


def _number(file: Path) -> int | None:
    """None where there is no file, or no limit."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _table(file: Path) -> dict[str, int]:
    try:
        words = file.read_text().split()
    except OSError:
        return {}
    return {name: int(value) for name, value in zip(words[::2], words[1::2], strict=False) if value.isdecimal()}
