"""Files that are there in full or not at all, and reading files that others wrote.

Knows folders and bytes, not what they mean.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from puna.errors import FileFormatError


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut; a no-op where folders cannot be opened."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def create_beside(path: Path, prefix: str = ".") -> tuple[int, Path]:
    """Open a new file with a random name in the folder of *path*; unlike tempfile's it gets the user's usual mode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f"{prefix}{secrets.token_hex(8)}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    return os.open(temporary, flags, 0o666), temporary


def write_atomically(path: Path, content: bytes) -> None:
    """Replace *path* by *content*; readers see the old or the new file, never a part."""
    descriptor, temporary = create_beside(path)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def open_regular(path: Path) -> int:
    """Open a file for reading, but never wait on a pipe or read a device.

    Errors: FileFormatError for anything that is not a regular file; OSError as open has it.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileFormatError(f"{path.name}: not a regular file")
    return descriptor


def read_limited(path: Path, max_bytes: int) -> bytes:
    """The whole content of a regular file of at most *max_bytes*.

    Errors: FileFormatError when it is larger or no regular file; OSError as open and read have it.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise FileFormatError(f"{path.name}: larger than {max_bytes} bytes")
    return content


def remove_empty_folders(folder: Path, root: Path) -> None:
    """Remove *folder* and its parents below *root* as long as they are empty."""
    while folder != root and folder.is_relative_to(root):
        try:
            folder.rmdir()
        except OSError:
            return
        folder = folder.parent
