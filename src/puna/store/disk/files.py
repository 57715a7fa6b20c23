"""Files that are there in full or not at all, and reading files that others wrote.

Knows folders and bytes, not what they mean.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from pathlib import Path

from puna.errors import FileFormatError, StoreError

NO_LINKS = frozenset((errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV))
_FICLONE = 0x40049409  # of Linux
_NOTHING_THERE = frozenset((errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG))


def is_absent(path: Path, error: OSError) -> bool:
    """Whether an error proves that there is nothing at *path*; any other may hide something.

    A link that leads nowhere is something: the disk it leads to may come back.
    """
    if error.errno not in _NOTHING_THERE:
        return False
    try:
        return not stat.S_ISLNK(os.lstat(path).st_mode)
    except OSError as second:
        return second.errno in _NOTHING_THERE


def is_file(path: Path) -> bool:
    """Whether a regular file is there.

    Errors: StoreError when that cannot be told; ``Path.is_file`` would say no.
    """
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError as error:
        if is_absent(path, error):
            return False
        raise StoreError(f"{path} cannot be read: {error.strerror}") from error


def names_in(folder: Path) -> list[str]:
    """The names in a folder, in order; none where there is no folder.

    Errors: StoreError when it cannot be read.
    """
    try:
        return sorted(os.listdir(folder))
    except NotADirectoryError:
        return []
    except OSError as error:
        if is_absent(folder, error):
            return []
        raise StoreError(f"the folder {folder} cannot be read: {error.strerror}") from error


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut; a no-op where folders cannot be opened."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # Windows, and folders that may be written only
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, so that they survive a power cut."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def create_beside(path: Path, prefix: str = ".") -> tuple[int, Path]:
    """Open a new file with a random name in the folder of *path*; unlike tempfile's it gets the user's usual mode."""
    make_folder(path.parent)
    temporary = path.parent / f"{prefix}{secrets.token_hex(8)}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    return os.open(temporary, flags, 0o666), temporary


def write_atomically(path: Path, content: bytes) -> None:
    """Replace *path* by *content*; readers see the old or the new file, never a part.

    When that fails the old file is back, also if all that failed was to make the new one survive a power cut.
    """
    descriptor, temporary = create_beside(path)
    spare: Path | None = None
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        spare = _second_name(path)
        os.replace(temporary, path)
        try:
            sync_folder(path.parent)
        except OSError:
            os.replace(spare, path) if spare else path.unlink()
            raise
    finally:
        for left in (temporary, spare):
            if left is not None:
                left.unlink(missing_ok=True)


def _second_name(path: Path) -> Path | None:
    """Another name of a file; None where there is no file, or no second name can be had."""
    spare = path.parent / f".{secrets.token_hex(8)}"
    try:
        os.link(path, spare)
    except OSError as error:
        if error.errno in NO_LINKS or is_absent(path, error):
            return None
        raise
    return spare


def clone(source: int, target: int) -> bool:
    """Let an empty open file have the bytes of another, as one block on the disk until either is changed.

    Returns whether the file system could.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return False
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:  # another file system, or one that cannot; what is wrong with the disk shows when it is written
        return False
    return True


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
    return read_with_time(path, max_bytes)[0]


def read_with_time(path: Path, max_bytes: int) -> tuple[bytes, float]:
    """As read_limited, and when this very content was written, in seconds since 1970."""
    descriptor = open_regular(path)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        content = file.read(min(max_bytes, found.st_size) + 1)
        if len(content) > found.st_size:  # a file that grows, or one whose size says nothing
            content += file.read(max_bytes + 1 - len(content))
    if len(content) > max_bytes:
        raise FileFormatError(f"{path.name}: larger than {max_bytes} bytes")
    return content, found.st_mtime


def remove_empty_folders(folder: Path, root: Path) -> None:
    """Remove *folder* and its parents below *root* as long as they are empty."""
    while folder != root and folder.is_relative_to(root):
        try:
            folder.rmdir()
        except OSError:
            return
        folder = folder.parent
