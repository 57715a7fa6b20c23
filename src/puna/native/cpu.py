"""What this machine's processor is, and how much of it and of the memory this process may use.

Knows nothing of the tensor library. Containers are seen through their control groups (cgroup v2): a limit on any level
above this process counts.
"""

from __future__ import annotations

import hashlib
import math
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from puna.host import MEMBERSHIP, MOUNT, control_groups, usable_cores

# The extensions that decide which kernels the tensor library runs, as Linux names them.
MATTERING = (
    *("sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512vbmi", "avx512_vnni"),
    *("avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"),
    *("asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2", "sme"),
)
_DARWIN_NAMES = {"FEAT_DotProd": "asimddp", "FEAT_I8MM": "i8mm", "FEAT_BF16": "bf16", "FEAT_FP16": "asimdhp", "FEAT_SME": "sme"}


@dataclass(frozen=True)
class Model:
    name: str
    flags: frozenset[str]

    @property
    def key(self) -> str:
        """The same for processors that run the same machine code in the same way."""
        return hashlib.sha256("\0".join([self.name, *sorted(self.flags)]).encode()).hexdigest()[:20]

    @property
    def mattering_flags(self) -> tuple[str, ...]:
        return tuple(flag for flag in MATTERING if flag in self.flags)


@dataclass(frozen=True)
class Limits:
    """What a control group grants; None where it sets no limit."""

    cpus: float | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Facts:
    model: str
    flags: tuple[str, ...]
    physical_cores: int
    logical_cores: int
    usable_cores: int  # logical ones that the scheduler may give to this process
    cpu_limit: float | None
    threads: int  # a good number of computing threads
    memory_bytes: int
    memory_available_bytes: int
    memory_limit_bytes: int | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@cache
def model() -> Model:
    if sys.platform == "darwin":
        return _darwin_model(_sysctl())
    try:
        return parse_cpuinfo(Path("/proc/cpuinfo").read_text(errors="replace"))
    except OSError:
        return Model(f"{platform.machine()} {platform.processor()}".strip(), frozenset())


def parse_cpuinfo(text: str) -> Model:
    """The first processor in the text of /proc/cpuinfo."""
    fields: dict[str, str] = {}
    for line in text.strip().split("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    flags = fields.get("flags") or fields.get("Features") or ""
    return Model(fields.get("model name") or platform.machine(), frozenset(flags.split()))


def _sysctl() -> str:
    try:
        done = subprocess.run(
            ["sysctl", "machdep.cpu.brand_string", "hw.optional"], capture_output=True, text=True, check=False, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def _darwin_model(sysctl: str) -> Model:
    values = dict(line.split(": ", 1) for line in sysctl.splitlines() if ": " in line)
    flags = {ours for theirs, ours in _DARWIN_NAMES.items() if values.get(f"hw.optional.arm.{theirs}") == "1"}
    return Model(values.get("machdep.cpu.brand_string", platform.machine()), frozenset(flags))


def cgroup_limits(membership: Path = MEMBERSHIP, mount: Path = MOUNT) -> Limits:
    """The tightest limits from this process's control group up to the root."""
    levels = control_groups(membership, mount)
    cpus = [limit for level in levels if (limit := _cpu_max(level / "cpu.max")) is not None]
    memory = [limit for level in levels if (limit := _memory_max(level / "memory.max")) is not None]
    return Limits(min(cpus, default=None), min(memory, default=None))


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


def _cpu_max(file: Path) -> float | None:
    match _words(file):
        case [quota, period] if quota.isdecimal() and period.isdecimal() and int(period) > 0:
            return int(quota) / int(period)
    return None


def _memory_max(file: Path) -> int | None:
    match _words(file):
        case [limit] if limit.isdecimal():
            return int(limit)
    return None


def physical_cores() -> int:
    return psutil.cpu_count(logical=False) or psutil.cpu_count() or 1


def threads(physical: int, usable: int, cpu_limit: float | None) -> int:
    """One computing thread per physical core, but no more than the process may run at once."""
    granted = math.inf if cpu_limit is None else max(1, math.floor(cpu_limit))
    return int(max(1, min(physical, usable, granted)))


def facts() -> Facts:
    limits = cgroup_limits()
    physical, usable = physical_cores(), usable_cores()
    memory = psutil.virtual_memory()
    return Facts(
        model=model().name,
        flags=model().mattering_flags,
        physical_cores=physical,
        logical_cores=psutil.cpu_count() or usable,
        usable_cores=usable,
        cpu_limit=limits.cpus,
        threads=threads(physical, usable, limits.cpus),
        memory_bytes=memory.total,
        memory_available_bytes=memory.available,
        memory_limit_bytes=limits.memory_bytes,
    )
