"""Content-addressed files: ``blobs/sha256-<64 hex digits>``.

A file gets its name only after its bytes were hashed and flushed to disk, so a blob that is there is whole. Before that, it is
claimed by whoever brings it, so that nobody takes it for one that is not used. A digest is checked before any path is made of it.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

from puna import packed_files
from puna.errors import BadRequest, FileFormatError, NotFound, StoreError
from puna.store.disk import space
from puna.store.disk.files import (
    NO_LINKS,
    clone,
    create_beside,
    is_absent,
    is_file,
    names_in,
    open_regular,
    read_limited,
    sync_folder,
)

CHUNK_BYTES = 1 << 20

_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")


def parse_digest(text: str) -> str:
    """The canonical form ``sha256:<hex>`` of a digest written with a colon or a dash.

    Errors: BadRequest.
    """
    match = _DIGEST.fullmatch(text)
    if match is None:
        raise BadRequest("invalid digest format")
    return f"sha256:{match.group(1)}"


def short(digest: str) -> str:
    """The first twelve hex digits, as progress lines show them."""
    return digest.removeprefix("sha256:")[:12]


class Claimant(Protocol):
    """Whoever brings blobs; *id* marks unfinished files, and is empty where nothing would be looked up by it."""

    id: str

    def bring(self, digest: str, is_there: Callable[[], bool]) -> bool:
        """Claim a blob that is about to get its name; returns whether it is new."""
        ...


@dataclass(frozen=True)
class Blob:
    """A stored blob; *is_new* when this operation brought it."""

    digest: str
    n_bytes: int
    is_new: bool


class BlobWriter:
    """Takes bytes for a new blob; ``commit`` gives it its name. Left without commit, nothing stays.

    *n_expected*: bytes that will come, for the error when there is no room. Errors: DiskFull; StoreError.
    """

    def __init__(self, blobs: Blobs, n_expected: int = 0) -> None:
        self._blobs = blobs
        self._n_expected = n_expected
        key = blobs.claimant.id if blobs.claimant else ""
        with space.storing(blobs.folder, n_expected):
            descriptor, self._path = create_beside(blobs.folder / "sha256-", prefix=f"sha256-{key}")
        self._file = os.fdopen(descriptor, "wb", buffering=0)
        self._hash = hashlib.sha256()
        self.n_bytes = 0

    def write(self, data: bytes) -> None:
        left = memoryview(data)
        with space.storing(self._blobs.folder, max(self._n_expected - self.n_bytes, len(data))):
            while left:
                left = left[self._file.write(left) :]
        self._hash.update(data)
        self.n_bytes += len(data)

    @property
    def digest(self) -> str:
        """Of what was written so far."""
        return f"sha256:{self._hash.hexdigest()}"

    def commit(self, expected: str | None = None) -> Blob:
        """Flush to disk and name the blob.

        Errors: BadRequest when the bytes do not have the *expected* digest; DiskFull; StoreError. Nothing stays then.
        """
        digest = self.digest
        if expected is not None and expected != digest:
            raise BadRequest(f'digest mismatch, expected "{expected}", got "{digest}"')
        with space.storing(self._blobs.folder, self.n_bytes):
            os.fsync(self._file.fileno())
            self._file.close()
            is_new = self._blobs.claim(digest)
            os.replace(self._path, self._blobs.path(digest))
            try:
                sync_folder(self._blobs.folder)
            except OSError:
                if is_new:
                    self._blobs.remove(digest)
                raise
        return Blob(digest, self.n_bytes, is_new)

    def __enter__(self) -> BlobWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)


class Blobs:
    """The folder of blobs; *claimant* claims those that are brought through this object.

    What is brought without a claimant may be removed once it is an hour old and no manifest names it.
    """

    def __init__(self, folder: Path, claimant: Claimant | None = None) -> None:
        self.folder = folder
        self.claimant = claimant

    def path(self, digest: str) -> Path:
        """Where a blob is, or would be.

        Errors: BadRequest for a malformed digest.
        """
        return self.folder / parse_digest(digest).replace(":", "-")

    def has(self, digest: str) -> bool:
        """Errors: BadRequest for a malformed digest; StoreError when it cannot be told."""
        return is_file(self.path(digest))

    def claim(self, digest: str) -> bool:
        """Say that a blob is about to get its name; returns whether it is new."""
        if self.claimant is None:
            return not self.has(digest)
        return self.claimant.bring(digest, lambda: self.has(digest))

    def n_bytes(self, digest: str) -> int:
        """Errors: NotFound; StoreError."""
        path = self.path(digest)
        try:
            return path.stat().st_size
        except OSError as error:
            raise self._unread(path, digest, error) from error

    def read(self, digest: str, max_bytes: int) -> bytes:
        """A small blob's content.

        Errors: NotFound; StoreError when it is there but cannot be read; FileFormatError when it is larger than *max_bytes*.
        """
        path = self.path(digest)
        try:
            return read_limited(path, max_bytes)
        except OSError as error:
            raise self._unread(path, digest, error) from error

    def writer(self, n_expected: int = 0) -> BlobWriter:
        return BlobWriter(self, n_expected)

    def add(self, content: bytes) -> Blob:
        """Store bytes that are in memory.

        Errors: DiskFull; StoreError.
        """
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        if not self.claim(digest):
            return Blob(digest, len(content), is_new=False)
        with self.writer(len(content)) as writer:
            writer.write(content)
            return writer.commit()

    def import_file(self, path: Path, *, link: bool = False, on_bytes: Callable[[int, int], None] | None = None) -> Blob:
        """Bring a local file into the store; *on_bytes* gets bytes done and bytes in all, and may raise to stop.

        With *link*, no space is used where the file system allows it: the blob shares the file's blocks until one of the two is
        changed, or where that cannot be is another name of the same file, which must not be changed afterwards.
        Errors: NotFound; FileFormatError when it is no regular file, or changes while it is read; DiskFull; StoreError.
        """
        try:
            descriptor = open_regular(path)
        except OSError as error:
            if is_absent(path, error):
                raise NotFound(f"{path}: {error.strerror}") from error
            raise StoreError(f"{path} cannot be read: {error.strerror}") from error
        with os.fdopen(descriptor, "rb") as file:
            before = os.fstat(file.fileno())
            if link:
                with self._shared(path, file.fileno()) as shared:
                    if shared is not None:
                        return self._take(shared, path, before, on_bytes)
            space.require(self.folder, before.st_size)
            chunks = _chunks(iter(lambda: file.read(CHUNK_BYTES), b""), before.st_size, on_bytes)
            with self.writer(before.st_size) as writer:
                for chunk in chunks:
                    writer.write(chunk)
                _check_unchanged(path, before)
                return writer.commit()

    def remove(self, digest: str) -> None:
        """Remove a blob and what was made of it; one that is not there is no error."""
        self.path(digest).unlink(missing_ok=True)
        packed_files.remove(self.folder.parent, digest)

    def __iter__(self) -> Iterator[str]:
        """Digests of all blobs, in no order; what has another name is left out.

        Errors: StoreError when the folder cannot be read.
        """
        for name in names_in(self.folder):
            if _DIGEST.fullmatch(name) and "-" in name:
                yield parse_digest(name)

    def _unread(self, path: Path, digest: str, error: OSError) -> NotFound | StoreError:
        if is_absent(path, error):
            return NotFound(f'blob "{digest}" not found')
        return StoreError(f'blob "{digest}" cannot be read: {error.strerror}')

    @contextmanager
    def _shared(self, path: Path, descriptor: int) -> Iterator[Path | None]:
        """A file in this folder that takes no room: a clone of the open file, else another name of it; None where neither can be.

        What still has that name at the end goes.
        """
        key = self.claimant.id if self.claimant else ""
        with space.storing(self.folder):
            copy, temporary = create_beside(self.folder / "sha256-", prefix=f"sha256-{key}")
        try:
            with space.storing(self.folder):
                try:
                    is_shared = clone(descriptor, copy)
                finally:
                    os.close(copy)
                is_shared = is_shared or _link(path, temporary)
            yield temporary if is_shared else None
        finally:
            temporary.unlink(missing_ok=True)

    def _take(self, shared: Path, path: Path, before: os.stat_result, on_bytes: Callable[[int, int], None] | None) -> Blob:
        """Give a file in this folder the name of its bytes."""
        digest = hashlib.sha256()
        with os.fdopen(open_regular(shared), "rb", buffering=0) as file:
            for chunk in _chunks(iter(lambda: file.read(CHUNK_BYTES), b""), before.st_size, on_bytes):
                digest.update(chunk)
            with space.storing(self.folder, before.st_size):
                os.fsync(file.fileno())  # who wrote the file need not have
        _check_unchanged(path, before)
        name = f"sha256:{digest.hexdigest()}"
        if not self.claim(name):
            return Blob(name, before.st_size, is_new=False)
        with space.storing(self.folder):
            os.replace(shared, self.path(name))
            try:
                sync_folder(self.folder)
                _check_unchanged(path, before)
            except (OSError, FileFormatError):
                self.remove(name)
                raise
        return Blob(name, before.st_size, is_new=True)


def _link(path: Path, taken: Path) -> bool:
    """Let *taken*, which is there, be another name of a file instead; returns whether that could be."""
    taken.unlink()
    try:
        os.link(path.resolve(), taken)
    except OSError as error:
        if error.errno in NO_LINKS:
            return False
        raise
    return True


def _chunks(source: Iterator[bytes], total: int, on_bytes: Callable[[int, int], None] | None) -> Iterator[bytes]:
    done = 0
    for chunk in source:
        yield chunk
        done += len(chunk)
        if on_bytes is not None:
            on_bytes(done, max(total, done))


def _check_unchanged(path: Path, before: os.stat_result) -> None:
    now = path.stat()
    if (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise FileFormatError(f"{path} changed while it was read; try again when nothing writes to it")
