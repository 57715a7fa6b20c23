"""Other processes, any of which may end while it is looked at."""

from __future__ import annotations

import psutil


def command_of(process: psutil.Process) -> list[str]:
    """Empty for one that has ended, whether somebody has waited for it or not."""
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []


def is_alive(process: psutil.Process) -> bool:
    """One that has ended may never be waited for: whoever takes over orphans does as it likes."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def children(process: psutil.Process) -> list[psutil.Process]:
    """Of one that has ended there are none."""
    try:
        return list(process.children())
    except psutil.NoSuchProcess:
        return []
