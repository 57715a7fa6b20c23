"""Room on the store's disk: asked for before something large is written, and named when it ran out.

Knows bytes and error numbers, not what is written.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from puna.errors import DiskFull, StoreError

_FULL = frozenset((errno.ENOSPC, errno.EDQUOT))


def require(folder: Path, n_bytes: int) -> None:
    """Errors: DiskFull when there is no room for so many bytes where *folder* is, or will be."""
    if n_bytes > _free(folder):
        raise full(folder, n_bytes)


def full(folder: Path, n_bytes: int) -> DiskFull:
    """What to say when *n_bytes* could not be written."""
    free = _free(folder)
    n_missing = n_bytes - free if n_bytes > free else max(1, n_bytes)  # a quota, or room that is kept for others
    wanted = f"{n_bytes} wanted, {free} free" if n_bytes > free else "the disk says it has room, a quota may not"
    return DiskFull(f"no space left for models in {folder}: {n_missing} more bytes are needed ({wanted})", n_missing)


def says_full(text: str) -> bool:
    """Whether another program's words about a failure mean that a disk is full."""
    return os.strerror(errno.ENOSPC) in text or os.strerror(errno.EDQUOT) in text


def explained(error: OSError, folder: Path, n_bytes: int) -> StoreError:
    """What a failed file operation means to the store, DiskFull among others; *n_bytes* were to be written."""
    if error.errno in _FULL:
        return full(folder, n_bytes)
    return StoreError(f"the models in {folder} could not be changed: {error.strerror or error}")


@contextmanager
def storing(folder: Path, n_bytes: int = 1) -> Iterator[None]:
    """Have errors of file operations in the block explained.

    Errors: DiskFull; StoreError.
    """
    try:
        yield
    except OSError as error:
        raise explained(error, folder, n_bytes) from error


def _free(folder: Path) -> int:
    while True:
        try:
            return shutil.disk_usage(folder).free
        except FileNotFoundError:
            if folder == folder.parent:
                return 0
            folder = folder.parent
