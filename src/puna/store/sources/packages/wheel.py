"""Read single members out of a wheel, checked against the wheel's own RECORD.

Nothing is unpacked by name: a member's bytes go to whoever asked, so no path in the archive is ever used as a path. What the
archive says of itself is limited before it is believed: members, the directory that lists them, how far each may grow.
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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType

from puna.errors import SourceError

MAX_MEMBERS = 20_000
MAX_DIRECTORY_BYTES = 8 << 20  # the archive's list of members, which is read at once
MAX_RECORD_BYTES = 8 << 20
MAX_LICENSES = 64
MAX_LICENSE_BYTES = 1 << 20  # of one file
MAX_LICENSES_BYTES = 4 << 20  # of all together
MAX_RATIO = 200  # of what a member grows to; model weights hardly compress
RATIO_FROM_BYTES = 64 << 20
MAX_TEXT_RATIO = 50  # of licences and RECORD: prose shrinks to a third, hashes to two thirds
TEXT_RATIO_FROM_BYTES = 64 << 10
CHUNK_BYTES = 1 << 20
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # zipfile limits what one read yields for these alone
_MEMBER = b"PK\x01\x02"  # how each begins in the directory
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
        with ExitStack() as stack:
            file = stack.enter_context(_LimitedFile(path))
            with self._damage():
                self._zip = stack.enter_context(zipfile.ZipFile(file))
            self._members = self._read_members()
            self._record = self._read_record()
            self._open = stack.pop_all()

    def __enter__(self) -> WheelFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._open.close()

    @property
    def models(self) -> list[str]:
        """Names of the GGUF files inside."""
        return sorted(name for name in self._members if name.lower().endswith(".gguf"))

    @property
    def licenses(self) -> list[str]:
        """Texts of the licence files in the wheel's metadata; that they are few and small is known before one is read."""
        names = [name for name in sorted(self._members) if _is_license(name)]
        if len(names) > MAX_LICENSES:
            raise SourceError(f"{self._name}: {len(names)} licence files are more than {MAX_LICENSES}")
        n_bytes = sum(self._members[name].file_size for name in names)
        if n_bytes > MAX_LICENSES_BYTES:
            raise SourceError(f"{self._name}: the licence files are larger than {MAX_LICENSES_BYTES} bytes together: {n_bytes}")
        return [self._read(name, MAX_LICENSE_BYTES).decode(errors="replace") for name in names]

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
        self._check_growth(info, RATIO_FROM_BYTES, MAX_RATIO)
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
        if any(info.compress_type not in METHODS for info in infos):
            raise SourceError(f"{self._name}: a member is compressed in a way that wheels do not use")
        if len(members) != len(infos):
            raise SourceError(f"{self._name}: a member appears twice")
        return members

    def _read_record(self) -> dict[str, Entry]:
        names = [name for name in self._members if PurePosixPath(name).match("*.dist-info/RECORD") and name.count("/") == 1]
        if len(names) != 1:
            raise SourceError(f"{self._name}: no wheel, it has {len(names)} RECORD files instead of one")
        content = io.BytesIO(self._read(names[0], MAX_RECORD_BYTES))
        models = frozenset(self.models)
        try:
            rows = csv.reader(io.TextIOWrapper(content, "utf-8", newline=""))
            return {row[0]: entry for row in rows if len(row) >= 2 and row[0] in models and (entry := _entry(row))}
        except (UnicodeDecodeError, csv.Error) as error:
            raise SourceError(f"{self._name}: RECORD cannot be read: {error}") from error

    def _read(self, name: str, max_bytes: int) -> bytes:
        """A text, whole."""
        info = self._members[name]
        if info.file_size > max_bytes:
            raise SourceError(f"{self._name}: {name} is larger than {max_bytes} bytes")
        self._check_growth(info, TEXT_RATIO_FROM_BYTES, MAX_TEXT_RATIO)
        with self._damage(), self._zip.open(info) as source:
            return source.read(max_bytes)

    def _check_growth(self, info: zipfile.ZipInfo, from_bytes: int, max_ratio: int) -> None:
        if info.file_size > from_bytes and info.file_size > max_ratio * max(1, info.compress_size):
            raise SourceError(f"{self._name}: {info.filename} would grow from {info.compress_size} to {info.file_size} bytes")

    @contextmanager
    def _damage(self) -> Iterator[None]:
        try:
            yield
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError, OverflowError) as error:
            raise SourceError(f"{self._name}: the wheel is damaged: {error}") from error


class _LimitedFile(io.FileIO):
    """The archive's file; no single read of it, the one of the directory included, may be larger than a directory may be.

    Each member in a directory begins with the same four bytes, so their number is known before anything is made of them.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._label = path.name

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > MAX_DIRECTORY_BYTES:
            raise SourceError(f"{self._label}: the list of members has {size} bytes, more than {MAX_DIRECTORY_BYTES}")
        content = super().read(size) or b""
        if content.startswith(_MEMBER) and content.count(_MEMBER) > MAX_MEMBERS:
            raise SourceError(f"{self._label}: more than {MAX_MEMBERS} members, which no wheel should have")
        return content


def _is_license(name: str) -> bool:
    parts = PurePosixPath(name).parts
    is_metadata = len(parts) > 1 and parts[0].endswith(".dist-info")
    return is_metadata and parts[-1].upper().startswith(("LICENSE", "LICENCE", "COPYING", "NOTICE"))


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
