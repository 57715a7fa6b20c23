"""What a GPU's driver says of it that ggml does not: which code it runs, and the driver's own version.

Asked by the place on the bus, never by number: ``CUDA_VISIBLE_DEVICES`` and its kin number devices anew. NVIDIA's driver
is a library (CUDA Driver API: ``cuInit``, ``cuDeviceGetByPCIBusId``, ``cuDeviceGetAttribute``); AMD's tells in files of the
kernel (``/sys/class/kfd``: ``gfx_target_version`` and ``location_id`` of each node). A driver that is not there or refuses
costs the answer. One that crashes or hangs costs the process, so only a process that may be lost asks.
"""

from __future__ import annotations

import ctypes
import re
import sys
from ctypes import byref, c_char_p, c_int, c_uint
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

CUDA_LIBRARY = "libcuda.so.1"
KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
AMDGPU_VERSION = Path("/sys/module/amdgpu/version")

# CUdevice_attribute, stable since CUDA 5.
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
_MAX_PROPERTIES_BYTES = 1 << 16
# Devices that ggml makes of one ("-v1") sit where that one does.
_PCI_ID = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})(?:\.[0-7])?(?=-v\d|$)")


@dataclass(frozen=True)
class Facts:
    """Empty: not known."""

    capability: str = ""  # NVIDIA: the compute capability, 8.9; AMD: the instruction set, gfx1100
    driver: str = ""  # NVIDIA: the newest CUDA that it speaks, 12.4; AMD: of the driver, where it tells


class DriverError(Exception):
    """Why there are no facts."""


def facts(library: str, pci_id: str) -> Facts:
    """*library* as ggml names it, *pci_id* as its devices do (``0000:c1:00.0``)."""
    try:
        place = _place(pci_id)
        if place and library == "CUDA":
            return cuda().facts(place)
        if place and library == "ROCm":
            return amd_facts(place)
    except DriverError as error:
        print(f"{library} at {pci_id}: {error}", file=sys.stderr)
    return Facts()


def _place(pci_id: str) -> str:
    """The device's place without the function: a GPU's is 0."""
    match = _PCI_ID.match(pci_id.lower())
    return ":".join(match.groups()) if match else ""


@cache
def cuda() -> CUDA:
    return CUDA(CUDA_LIBRARY)


@dataclass
class CUDA:
    """NVIDIA's driver."""

    library: str
    _symbols: dict[str, Any] = field(default_factory=dict, init=False)

    def facts(self, place: str) -> Facts:
        """Errors: DriverError when the driver is missing, incomplete, or refuses."""
        self._call("cuInit", c_uint(0))
        device, version, major, minor = c_int(), c_int(), c_int(), c_int()
        self._call("cuDeviceGetByPCIBusId", byref(device), c_char_p(f"{place}.0".encode()))
        self._call("cuDeviceGetAttribute", byref(major), c_int(_CAPABILITY_MAJOR), device)
        self._call("cuDeviceGetAttribute", byref(minor), c_int(_CAPABILITY_MINOR), device)
        self._call("cuDriverGetVersion", byref(version))
        if major.value < 1 or minor.value < 0:
            raise DriverError(f"a compute capability of {major.value}.{minor.value} is impossible")
        driver = f"{version.value // 1000}.{version.value % 1000 // 10}" if version.value > 0 else ""
        return Facts(f"{major.value}.{minor.value}", driver)

    def _call(self, name: str, *arguments: object) -> None:
        status = self._symbol(name)(*arguments)
        if status != 0:
            raise DriverError(f"{name} answers with error {status}")

    def _symbol(self, name: str) -> Any:
        try:
            if name not in self._symbols:
                self._symbols[name] = getattr(ctypes.CDLL(self.library), name)
        except (OSError, AttributeError) as error:
            raise DriverError(str(error)) from error
        return self._symbols[name]


def amd_facts(place: str, nodes: Path = KFD_NODES, version: Path = AMDGPU_VERSION) -> Facts:
    """Errors: DriverError when the kernel knows no such GPU."""
    for file in sorted(nodes.glob("*/properties")):
        properties = _properties(file)
        target = properties.get("gfx_target_version", 0)
        if target > 0 and _kfd_place(properties) == place:
            return Facts(_gfx(target), _first_line(version))
    raise DriverError(f"{nodes} has no such GPU")


def _properties(file: Path) -> dict[str, int]:
    """Lines of a name and a number; others are left out, and so is a file that cannot be read."""
    try:
        with file.open(encoding="ascii", errors="replace") as stream:
            lines = stream.read(_MAX_PROPERTIES_BYTES).splitlines()
    except OSError:
        return {}
    words = [line.split() for line in lines]
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and re.fullmatch(r"[0-9]{1,20}", pair[1])}


def _kfd_place(properties: dict[str, int]) -> str:
    location = properties.get("location_id", 0)  # bus, device and function in 8, 5 and 3 bits
    return f"{properties.get('domain', 0):04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}"


def _gfx(target: int) -> str:
    """Two decimal digits each of minor version and stepping, which the name has as one hexadecimal digit each."""
    return f"gfx{target // 10_000}{target // 100 % 100:x}{target % 100:x}"


def _first_line(file: Path) -> str:
    try:
        with file.open(encoding="ascii", errors="replace") as stream:
            return stream.readline(32).strip()
    except OSError:
        return ""
