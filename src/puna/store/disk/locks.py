"""One lock for all threads and processes that change a store; held for moments, never while something long runs.

The operating system frees it when its holder ends, in whatever way. Who only reads needs none. Knows not what is changed.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from puna.errors import StoreError
from puna.store.disk.files import make_folder
from puna.store.disk.space import explained

if TYPE_CHECKING:
    from filelock import FileLock

PATIENCE_S = 60.0
POLL_S = 0.01

NO_LOCKS = frozenset((errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP))


class LocksMissing(StoreError):
    """The file system has no locks: nobody can be kept from changing the store at the same time."""


class StoreBusy(StoreError):
    """Another process has held the lock for all the time that one was willing to wait."""


class StoreLock:
    """The lock; the thread that holds it may take it again."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.threads = threading.RLock()
        self._depth = 0
        self._file: FileLock | None = None

    @contextmanager
    def held(self, patience_s: float = PATIENCE_S) -> Iterator[None]:
        """Nobody else changes the store inside the block.

        Errors: LocksMissing; StoreBusy; DiskFull; StoreError when the lock's file cannot be made or opened.
        """
        if not self.threads.acquire(timeout=patience_s):
            raise self._busy()
        try:
            if self._depth == 0:
                self._acquire(patience_s)
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if self._depth == 0 and self._file is not None:
                    self._file.release()
        finally:
            self.threads.release()

    def _acquire(self, patience_s: float) -> None:
        from filelock import FileLock, Timeout  # as long to import as all else here; who only reads needs none of it

        if self._file is None:
            # thread_local: which thread holds it is told by the lock around it
            self._file = FileLock(self.root / ".lock", thread_local=False, fallback_to_soft=False, preserve_lock_file=True)
        try:
            make_folder(self.root)
            self._file.acquire(patience_s, poll_interval=POLL_S)
        except Timeout as error:
            raise self._busy() from error
        except OSError as error:
            if error.errno in NO_LOCKS:
                raise LocksMissing(f"the file system of {self.root} has no locks: {error.strerror}") from error
            raise explained(error, self.root, 1) from error

    def _busy(self) -> StoreBusy:
        return StoreBusy(f"another process is changing the models in {self.root}; try again")
