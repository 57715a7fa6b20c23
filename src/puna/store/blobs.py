"""Content-addressed files: ``blobs/sha256-<64 hex digits>``.

A file gets its name only after its bytes were hashed and flushed to disk, so a blob that is there is whole.
A digest is checked before any path is made of it.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from puna.errors import BadRequest, FileFormatError, NotFound
from puna.store.files import create_beside, open_regular, read_limited, sync_folder

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


@dataclass(frozen=True)
class Blob:
    """A stored blob; *is_new* when this operation brought it."""

    digest: str
    n_bytes: int
    is_new: bool


class BlobWriter:
    """Takes bytes for a new blob; ``commit`` gives it its name. Left without commit, nothing stays."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        descriptor, self._path = create_beside(blobs.folder / "sha256-", prefix="sha256-")
        self._file = os.fdopen(descriptor, "wb")
        self._hash = hashlib.sha256()
        self.n_bytes = 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._hash.update(data)
        self.n_bytes += len(data)

    @property
    def digest(self) -> str:
        """Of what was written so far."""
        return f"sha256:{self._hash.hexdigest()}"

    def commit(self, expected: str | None = None) -> Blob:
        """Flush to disk and name the blob.

        Errors: BadRequest when the bytes do not have the *expected* digest; nothing stays then.
        """
        digest = self.digest
        if expected is not None and expected != digest:
            raise BadRequest(f'digest mismatch, expected "{expected}", got "{digest}"')
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        is_new = not self._blobs.has(digest)
        os.replace(self._path, self._blobs.path(digest))
        sync_folder(self._blobs.folder)
        return Blob(digest, self.n_bytes, is_new)

    def __enter__(self) -> BlobWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)


class Blobs:
    """The folder of blobs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, digest: str) -> Path:
        """Where a blob is, or would be.

        Errors: BadRequest for a malformed digest.
        """
        return self.folder / parse_digest(digest).replace(":", "-")

    def has(self, digest: str) -> bool:
        return self.path(digest).is_file()

    def n_bytes(self, digest: str) -> int:
        """Errors: NotFound."""
        try:
            return self.path(digest).stat().st_size
        except FileNotFoundError as error:
            raise NotFound(f'blob "{digest}" not found') from error

    def read(self, digest: str, max_bytes: int) -> bytes:
        """A small blob's content.

        Errors: NotFound; FileFormatError when it is larger than *max_bytes*.
        """
        try:
            return read_limited(self.path(digest), max_bytes)
        except FileNotFoundError as error:
            raise NotFound(f'blob "{digest}" not found') from error

    def writer(self) -> BlobWriter:
        return BlobWriter(self)

    def add(self, content: bytes) -> Blob:
        """Store bytes that are in memory."""
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        if self.has(digest):
            return Blob(digest, len(content), is_new=False)
        with self.writer() as writer:
            writer.write(content)
            return writer.commit()

    def import_file(self, path: Path, *, link: bool = False, on_bytes: Callable[[int, int], None] | None = None) -> Blob:
        """Bring a local file into the store; *on_bytes* gets bytes done and bytes in all, and may raise to stop.

        With *link*, the blob is another name of the same file where the file system allows it: no space is used, but
        the file must not be changed afterwards.
        Errors: NotFound; FileFormatError when it is no regular file, or changes while it is read.
        """
        try:
            descriptor = open_regular(path)
        except OSError as error:
            raise NotFound(f"{path}: {error.strerror}") from error
        with os.fdopen(descriptor, "rb") as file:
            before = os.fstat(file.fileno())
            chunks = _chunks(iter(lambda: file.read(CHUNK_BYTES), b""), before.st_size, on_bytes)
            if link and (blob := self._link(path, before, chunks)):
                return blob
            file.seek(0)
            chunks = _chunks(iter(lambda: file.read(CHUNK_BYTES), b""), before.st_size, on_bytes)
            with self.writer() as writer:
                for chunk in chunks:
                    writer.write(chunk)
                _check_unchanged(path, before)
                return writer.commit()

    def remove(self, digest: str) -> None:
        """Remove a blob; one that is not there is no error."""
        self.path(digest).unlink(missing_ok=True)

    def __iter__(self) -> Iterator[str]:
        """Digests of all blobs, in no order; what has another name is left out."""
        if not self.folder.is_dir():
            return
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if _DIGEST.fullmatch(entry.name) and "-" in entry.name:
                    yield parse_digest(entry.name)

    def _link(self, path: Path, before: os.stat_result, chunks: Iterator[bytes]) -> Blob | None:
        digest = hashlib.sha256()
        for chunk in chunks:
            digest.update(chunk)
        name = f"sha256:{digest.hexdigest()}"
        if self.has(name):
            return Blob(name, before.st_size, is_new=False)
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path.resolve(), self.path(name))
        except OSError:  # another file system, or one without links
            return None
        try:
            _check_unchanged(path, before)
        except FileFormatError:
            self.remove(name)
            raise
        return Blob(name, before.st_size, is_new=True)


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
