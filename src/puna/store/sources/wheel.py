"""Read single members out of a wheel, checked against the wheel's own RECORD.

Nothing is unpacked by name: a member's bytes go to whoever asked, so no path in the archive is ever used as a path.
Knows nothing of where the wheel came from.
"""

from __future__ import annotations

import base64
import binascii
import csv
import hashlib
import io
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType

from puna.errors import SourceError

MAX_MEMBERS = 100_000
MAX_RECORD_BYTES = 32 << 20
MAX_TEXT_BYTES = 1 << 20
MAX_RATIO = 200  # of what a member grows to; model weights hardly compress
RATIO_FROM_BYTES = 64 << 20
CHUNK_BYTES = 1 << 20
HASHES = ("sha256", "sha384", "sha512")  # what the wheel format calls secure


@dataclass(frozen=True)
class Entry:
    """A line of RECORD; *n_bytes* is None where the line leaves it out."""

    algorithm: str
    digest: bytes
    n_bytes: int | None


class WheelFile:
    """An open wheel; a context manager.

    Errors of all methods: SourceError when the archive or its RECORD is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._name = path.name
        with self._damage():
            self._zip = zipfile.ZipFile(path)
        try:
            self._members = self._read_members()
            self._record = self._read_record()
        except BaseException:
            self._zip.close()
            raise

    def __enter__(self) -> WheelFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._zip.close()

    @property
    def models(self) -> list[str]:
        """Names of the GGUF files inside."""
        return sorted(name for name in self._members if name.lower().endswith(".gguf"))

    @property
    def licenses(self) -> list[str]:
        """Texts of the licence files in the wheel's metadata."""
        found = []
        for name in sorted(self._members):
            parts = PurePosixPath(name).parts
            is_metadata = len(parts) > 1 and parts[0].endswith(".dist-info")
            if is_metadata and parts[-1].upper().startswith(("LICENSE", "LICENCE", "COPYING", "NOTICE")):
                found.append(self._read(name, MAX_TEXT_BYTES).decode(errors="replace"))
        return found

    def n_bytes(self, member: str) -> int:
        """What a member will grow to."""
        return self._members[member].file_size

    def chunks(self, member: str) -> Iterator[bytes]:
        """A member's bytes; the last chunk comes before the hash is checked, so keep nothing until this ends."""
        info = self._members[member]
        entry = self._record.get(member)
        if entry is None:
            raise SourceError(f"{self._name}: RECORD has no hash of {member}")
        if entry.n_bytes is not None and entry.n_bytes != info.file_size:
            raise SourceError(f"{self._name}: {member} has {info.file_size} bytes, but RECORD says {entry.n_bytes}")
        if info.file_size > RATIO_FROM_BYTES and info.file_size > MAX_RATIO * max(1, info.compress_size):
            raise SourceError(f"{self._name}: {member} would grow from {info.compress_size} to {info.file_size} bytes")
        digest = hashlib.new(entry.algorithm)
        done = 0
        with self._damage(), self._zip.open(info) as source:
            while chunk := source.read(CHUNK_BYTES):
                done += len(chunk)
                digest.update(chunk)
                yield chunk
        if done != info.file_size:
            raise SourceError(f"{self._name}: {member} ends after {done} of {info.file_size} bytes")
        if digest.digest() != entry.digest:
            raise SourceError(f"{self._name}: {member} does not have the hash that RECORD states; the file is damaged")

    def _read_members(self) -> dict[str, zipfile.ZipInfo]:
        infos = self._zip.infolist()
        if len(infos) > MAX_MEMBERS:
            raise SourceError(f"{self._name}: {len(infos)} members are more than any wheel should have")
        members = {info.filename: info for info in infos}
        if len(members) != len(infos):
            raise SourceError(f"{self._name}: a member appears twice")
        return members

    def _read_record(self) -> dict[str, Entry]:
        names = [name for name in self._members if PurePosixPath(name).match("*.dist-info/RECORD") and name.count("/") == 1]
        if len(names) != 1:
            raise SourceError(f"{self._name}: no wheel, it has {len(names)} RECORD files instead of one")
        try:
            text = self._read(names[0], MAX_RECORD_BYTES).decode()
            rows = list(csv.reader(io.StringIO(text)))
        except (UnicodeDecodeError, csv.Error) as error:
            raise SourceError(f"{self._name}: RECORD cannot be read: {error}") from error
        return {row[0]: entry for row in rows if len(row) >= 2 and (entry := _entry(row))}

    def _read(self, name: str, max_bytes: int) -> bytes:
        with self._damage(), self._zip.open(self._members[name]) as source:
            content = source.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise SourceError(f"{self._name}: {name} is larger than {max_bytes} bytes")
        return content

    @contextmanager
    def _damage(self) -> Iterator[None]:
        try:
            yield
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError, OverflowError) as error:
            raise SourceError(f"{self._name}: the wheel is damaged: {error}") from error


def _entry(row: list[str]) -> Entry | None:
    algorithm, _, encoded = row[1].partition("=")
    if algorithm not in HASHES:
        return None
    try:
        digest = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
    except (binascii.Error, ValueError):
        return None
    size = row[2] if len(row) > 2 else ""
    return Entry(algorithm, digest, int(size) if size.isascii() and size.isdigit() and len(size) < 19 else None)
