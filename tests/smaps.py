"""What Linux tells of this process's memory."""

from __future__ import annotations

import re
from pathlib import Path


def flags_of(address: int) -> list[str]:
    """What the kernel says of the mapping that holds the address."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_inside = int(match[1], 16) <= address < int(match[2], 16)
        elif is_inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []
