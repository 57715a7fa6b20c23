"""Whether the system kills processes because memory is short: it tells the killed one's parent no more than SIGKILL.

Linux counts such kills per control group (``memory.events``), and for the whole machine in ``/proc/vmstat``.
"""

from __future__ import annotations

from pathlib import Path

from puna.host import MEMBERSHIP, MOUNT, control_groups

VMSTAT = Path("/proc/vmstat")


def oom_kills(membership: Path = MEMBERSHIP, mount: Path = MOUNT, vmstat: Path = VMSTAT) -> int:
    """How many so far, in this process's control group if it has one that counts; else anywhere. 0 where nobody counts."""
    files = [group / "memory.events" for group in control_groups(membership, mount)[:1]]
    for file in (*files, vmstat):
        count = _count(file)
        if count is not None:
            return count
    return 0


def _count(file: Path) -> int | None:
    try:
        words = file.read_text().split()
    except OSError:
        return None
    return next((int(value) for name, value in zip(words[::2], words[1::2], strict=False) if name == "oom_kill"), None)
