"""A temporary folder on the store's disk, which has room for models; /tmp often has not."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from puna.store.prune import TEMPORARY


@contextmanager
def scratch(root: Path, prefix: str) -> Iterator[Path]:
    """A folder that is gone afterwards; what a killed process leaves, the next start of a server removes."""
    parent = root / TEMPORARY
    parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as folder:
            yield Path(folder)
    finally:
        with suppress(OSError):  # others are at work there
            parent.rmdir()
