"""A temporary folder on the store's disk, which has room for models; /tmp often has not."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from puna.store.disk.claims import Work
from puna.store.disk.prune import TEMPORARY
from puna.store.disk.space import storing


@contextmanager
def scratch(work: Work, prefix: str) -> Iterator[Path]:
    """A folder that is gone afterwards; what a killed process leaves, the next start of a server removes.

    Errors: DiskFull; StoreError.
    """
    parent = work.root / TEMPORARY
    try:
        with storing(work.root):
            folder = _make(parent, f"{prefix}{work.id}-" if work.id else prefix)
        with folder as path:
            yield Path(path)
    finally:
        with suppress(OSError):  # others are at work there
            parent.rmdir()


def _make(parent: Path, prefix: str) -> tempfile.TemporaryDirectory[str]:
    while True:
        parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # somebody else was done, and took the folder above away
            return tempfile.TemporaryDirectory(prefix=prefix, dir=parent)
