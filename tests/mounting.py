"""File systems of their own for tests, where they may be mounted: a right of who runs them, and not something to install."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

IMAGE_MB = {"ext4": 16, "btrfs": 128, "xfs": 320}  # the least that each makes a file system of, or a little more
_OPTIONS = {"ext4": ("-m", "0")}  # nothing is kept for the administrator


@contextmanager
def mounted(kind: str, folder: Path) -> Iterator[Path]:
    """A file system of this kind at a folder of its own; one in memory has 8 MB."""
    disk, image = folder / kind, folder / f"{kind}.img"
    disk.mkdir()
    if kind == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(disk)]
    else:
        with image.open("wb") as file:
            file.truncate(IMAGE_MB[kind] << 20)
        subprocess.run([f"mkfs.{kind}", "-q", *_OPTIONS.get(kind, ()), str(image)], check=True, capture_output=True)
        command = ["mount", "-o", "loop", str(image), str(disk)]
    subprocess.run(command, check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def mountable(kinds: Sequence[str]) -> list[str]:
    """Those of these kinds that can be made and mounted here."""
    if sys.platform != "linux" or os.geteuid() or not _may_mount():
        return []
    known = {line.split()[-1] for line in Path("/proc/filesystems").read_text().splitlines()}
    return [kind for kind in kinds if kind in known and (kind == "tmpfs" or (shutil.which(f"mkfs.{kind}") and _has_loops()))]


def _has_loops() -> bool:
    return Path("/dev/loop-control").exists()


@cache
def _may_mount() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(["mount", "-t", "tmpfs", "none", folder], capture_output=True, check=False)
        if not done.returncode:
            subprocess.run(["umount", folder], check=True)
    return not done.returncode


def free_bytes(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize
