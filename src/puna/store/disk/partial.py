"""A blob that is on its way: ``sha256-<hex>-partial`` with room for all of it, and ``-partial-<N>`` for each part.

The layout is Ollama's, so that either program takes up what the other began: a part's file says where it lies and how much of
it is there. Whoever brings the blob keeps the large file locked; the system frees the lock when the process dies. What the
parts say was on the disk when they said it. Knows not where the bytes come from.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from puna.errors import StoreError
from puna.store.disk.blobs import Blob, Blobs
from puna.store.disk.files import make_folder, names_in, read_limited, sync_folder
from puna.store.disk.locks import NO_LOCKS
from puna.store.disk.space import storing

log = logging.getLogger(__name__)

MAX_STATE_BYTES = 4096
MAX_PARTS = 1 << 16
PARTIAL = re.compile(r"sha256-(?P<hex>[0-9a-f]{64})-partial(?:-(?P<number>[0-9]{1,5}))?")


class _State(msgspec.Struct, rename="pascal"):
    """As it is in a part's file."""

    n: int
    offset: int
    size: int
    completed: int = 0


@dataclass
class Part:
    """A piece of the file, filled from its beginning; *n_done* is its thread's to change."""

    number: int
    begin: int
    n_bytes: int
    n_done: int = 0

    @property
    def end(self) -> int:
        return self.begin + self.n_bytes

    @property
    def is_done(self) -> bool:
        return self.n_done == self.n_bytes


class Partial:
    """The file and its parts, locked. Made by ``begin``, to be ended with ``commit``, ``discard`` or ``leave``.

    Errors of all methods: DiskFull; StoreError.
    """

    def __init__(self, blobs: Blobs, digest: str, descriptor: int, parts: list[Part]) -> None:
        self.digest = digest
        self.parts = parts
        self.n_bytes = sum(part.n_bytes for part in parts)
        self._blobs = blobs
        self._path = _path(blobs, digest)
        self._descriptor = descriptor
        self._users = threading.Condition()
        self._n_users = 0
        self._noted = dict.fromkeys(range(len(parts)), -1)

    @property
    def n_done(self) -> int:
        return sum(part.n_done for part in self.parts)

    @property
    def n_in_front(self) -> int:
        """Bytes that are there from the beginning without a gap."""
        for part in self.parts:
            if not part.is_done:
                return part.begin + part.n_done
        return self.n_bytes

    def write(self, part: Part, data: bytes | memoryview) -> None:
        """Add to what is there of a part."""
        left, at = memoryview(data), part.begin + part.n_done
        with storing(self._blobs.folder, max(self.n_bytes - self.n_done, 1)), self._open() as descriptor:
            while left:
                n_written = os.pwrite(descriptor, left, at)
                left, at = left[n_written:], at + n_written
        part.n_done += len(data)

    def read_into(self, block: memoryview, at: int) -> int:
        """Fill a block with what is there; returns how many bytes that is."""
        with storing(self._blobs.folder), self._open() as descriptor:
            return os.preadv(descriptor, [block], at)

    def note(self) -> None:
        """Have the parts' files say what is there now, after it has reached the disk."""
        news = [(part, part.n_done) for part in self.parts if part.n_done != self._noted[part.number]]
        if not news:
            return
        with storing(self._blobs.folder, 1):
            if any(n_done for _, n_done in news):
                with self._open() as descriptor:
                    os.fsync(descriptor)
            for part, n_done in news:
                self._write_state(part, n_done)
                self._noted[part.number] = n_done

    def restart(self, parts: Sequence[Part]) -> None:
        """Forget what is there, and have other parts."""
        self._remove_states()
        self.parts = list(parts)
        self._noted = dict.fromkeys(range(len(parts)), -1)

    def commit(self, digest: str) -> Blob:
        """Give the blob its name, which is what its bytes have been found to be."""
        with storing(self._blobs.folder, 1):
            os.fsync(self._descriptor)
            is_new = self._blobs.claim(digest)
            os.replace(self._path, self._blobs.path(digest))
            sync_folder(self._blobs.folder)
            self._remove_states()
        self._close()
        return Blob(digest, self.n_bytes, is_new)

    def discard(self) -> None:
        """Remove everything: it is not what it should be."""
        with storing(self._blobs.folder):
            self._remove_states()
            self._path.unlink(missing_ok=True)
        self._close()

    def leave(self) -> None:
        """Keep what is there for the next try."""
        if self._descriptor < 0:
            return
        try:
            self.note()
        except StoreError as error:
            log.info("what was fetched of %s may have to be fetched again: %s", self.digest, error)
        self._close()

    @contextmanager
    def _open(self) -> Iterator[int]:
        """The file, which stays open meanwhile: a thread that comes too late must not write to what has its number now."""
        with self._users:
            if self._descriptor < 0:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            self._n_users += 1
            descriptor = self._descriptor
        try:
            yield descriptor
        finally:
            with self._users:
                self._n_users -= 1
                self._users.notify_all()

    def _close(self) -> None:
        with self._users:
            descriptor, self._descriptor = self._descriptor, -1
            self._users.wait_for(lambda: self._n_users == 0)
        if descriptor >= 0:
            os.close(descriptor)  # and the lock with it

    def _write_state(self, part: Part, n_done: int) -> None:
        """In place: the text only grows, and one short write is whole or not there."""
        state = msgspec.json.encode(_State(part.number, part.begin, part.n_bytes, n_done))
        path = _path(self._blobs, self.digest, part.number)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        try:
            os.pwrite(descriptor, state, 0)
        finally:
            os.close(descriptor)

    def _remove_states(self) -> None:
        tidy(self._blobs, self.digest)


def begin(blobs: Blobs, digest: str, n_bytes: int, part_bytes: int) -> Partial | None:
    """Begin a blob, or take it up where it was left; None while somebody else is bringing it.

    Errors: DiskFull; StoreError.
    """
    path = _path(blobs, digest)
    with storing(blobs.folder, 1):
        make_folder(blobs.folder)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        try:
            if not _lock(descriptor) or not _is_at(descriptor, path):
                os.close(descriptor)
                return None
            parts = _resumed(blobs, digest, n_bytes) if os.fstat(descriptor).st_size == n_bytes else None
            partial = Partial(blobs, digest, descriptor, parts or divided(n_bytes, part_bytes))
            if parts is None:
                partial.restart(partial.parts)
                os.ftruncate(descriptor, n_bytes)
        except BaseException:
            with suppress(OSError):
                os.close(descriptor)
            raise
    return partial


def tidy(blobs: Blobs, digest: str) -> None:
    """Remove the parts' files, of a blob that is here whole or is begun anew.

    Errors: OSError; StoreError.
    """
    for path in _states(blobs, digest):
        path.unlink(missing_ok=True)


def is_held(path: Path) -> bool:
    """Whether somebody is bringing the blob of this unfinished file now."""
    from filelock import unlock_descriptor

    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        is_free = _lock(descriptor)
        if is_free:
            unlock_descriptor(descriptor)
        return not is_free
    finally:
        os.close(descriptor)


def divided(n_bytes: int, part_bytes: int) -> list[Part]:
    """Parts of so many bytes each, but for the last."""
    return [Part(number, at, min(part_bytes, n_bytes - at)) for number, at in enumerate(range(0, n_bytes, part_bytes))] or [
        Part(0, 0, 0)
    ]


def n_fetched(blobs: Blobs, digest: str) -> int:
    """What the parts' files say is there, of a blob that anybody is bringing."""
    return sum(state.completed for state in _read_states(blobs, digest))


def n_allocated(blobs: Blobs, digest: str) -> int:
    """Bytes of the disk that an unfinished blob has already."""
    try:
        found = os.stat(_path(blobs, digest))
    except OSError:
        return 0
    return getattr(found, "st_blocks", 0) * 512


def _path(blobs: Blobs, digest: str, number: int | None = None) -> Path:
    path = blobs.path(digest)
    return path.with_name(f"{path.name}-partial" + ("" if number is None else f"-{number}"))


def _states(blobs: Blobs, digest: str) -> list[Path]:
    wanted = blobs.path(digest).name.removeprefix("sha256-")
    matches = ((name, PARTIAL.fullmatch(name)) for name in names_in(blobs.folder))
    return [blobs.folder / name for name, match in matches if match and match["hex"] == wanted and match["number"]]


def _read_states(blobs: Blobs, digest: str) -> list[_State]:
    found = []
    for path in _states(blobs, digest)[:MAX_PARTS]:
        with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError, ValueError):
            found.append(msgspec.json.decode(read_limited(path, MAX_STATE_BYTES), type=_State))
    return sorted(found, key=lambda state: state.offset)


def _resumed(blobs: Blobs, digest: str, n_bytes: int) -> list[Part] | None:
    """The parts of an earlier try, if together they are the whole."""
    parts: list[Part] = []
    for state in _read_states(blobs, digest):
        end = parts[-1].end if parts else 0
        if (state.n, state.offset) != (len(parts), end) or state.size < 0 or not 0 <= state.completed <= state.size:
            return None
        parts.append(Part(state.n, state.offset, state.size, state.completed))
    return parts if parts and parts[-1].end == n_bytes else None


def _lock(descriptor: int) -> bool:
    from filelock import lock_descriptor

    try:
        return lock_descriptor(descriptor, blocking=False)
    except OSError as error:
        if error.errno in NO_LOCKS:  # then nobody can tell; what comes is hashed
            return True
        raise


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file still has its name: its last holder may have finished it meanwhile."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
