"""Packed matrices of a model, kept in a file so that the next load maps them instead of packing them anew.

The file is a header, the bytes of all packed matrices, and a seal. The header is what this model and this layout make of it, to
the byte, and the file's name has a part of its digest; so nothing of a file is ever interpreted: it is the expected one or it
is not used. Which model it is, ``puna.ml.ggml.packed_origin`` says: a blob, or another file in one state of it.

The seal is the digest of all matrices, and for which state of the file it was last found right: which inode it was, and when
it was last changed. While that is the file's state it maps at once; in any other all of it is read and compared. A few rows
are compared with the model's as well, which a file that was made by other sources would not stand.

What was packed is written by a thread of low priority while the model is already used. A file gets its name when all of
it is on the disk. Where that cannot be, nothing is kept and nothing fails.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import shutil
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from puna import packed_files
from puna.gguf.reader import GGUFFile
from puna.ml.ggml.packed_origin import Origin
from puna.native.kernels.library import LAYOUT

log = logging.getLogger(__name__)

# Fewer bytes than these are packed as soon as mapped.
KEPT_FROM_BYTES = 256 << 20
_CHUNK_BYTES = 8 << 20
_MAGIC = b"puna packed weights\n"
_NICENESS = 19
_STATE = struct.Struct("<QQ")
_DIGEST = hashlib.sha256
SEAL_BYTES = _DIGEST().digest_size + _STATE.size

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Entry:
    """One matrix: the tensors whose rows it has, and where it lies in the data."""

    names: tuple[str, ...]
    type_name: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


class PackedCache:
    """The place for one model's packed matrices, which need not be there."""

    def __init__(self, origin: Origin, limit: int) -> None:
        self._origin = origin
        self._limit = limit
        self._writer: threading.Thread | None = None
        self._is_closed = threading.Event()

    @classmethod
    def of(cls, file: GGUFFile, models: Path | None, limit: int) -> PackedCache | None:
        """*models*: the folder for a file that is no blob of one. None where nothing is to be kept, or could not be believed."""
        origin = Origin.of(file, models) if limit > 0 else None
        return cls(origin, limit) if origin else None

    def is_of(self, descriptor: int) -> bool:
        """Whether the file that is open there is the one that this is for."""
        return self._origin.is_open_at(descriptor)

    def _place(self, header: bytes) -> Path:
        how = f"{LAYOUT}-{hashlib.sha256(header).hexdigest()[:16]}"
        return packed_files.place_of(self._origin.root, self._origin.name, how)

    def find(self, entries: Sequence[Entry], is_sound: Callable[[Bytes], bool]) -> Bytes | None:
        """The data as it is on disk; None where it is not, or *is_sound* says that it is something else."""
        header, n_bytes = _header(self._origin, entries), sum(entry.n_bytes for entry in entries)
        path, data = self._place(header), None
        try:
            with open(path, "rb") as file:
                is_whole = (
                    os.fstat(file.fileno()).st_size == len(header) + n_bytes + SEAL_BYTES and file.read(len(header)) == header
                )
                if is_whole:
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                    data = np.frombuffer(mapped, np.uint8)[len(header) : len(header) + n_bytes]
                    with suppress(AttributeError, OSError, ValueError):
                        mapped.madvise(mmap.MADV_WILLNEED)
                    seal = mapped[-SEAL_BYTES:]
                    is_whole = _state(file.fileno()) == seal[-_STATE.size :] or _digest(data) == seal[: -_STATE.size]
        except FileNotFoundError:
            return None
        except OSError as error:
            log.debug("packed weights %s are not used: %s", path, error)
            return None
        if is_whole and data is not None and is_sound(data):
            with suppress(OSError), open(path, "r+b") as file:
                _seal(file, len(header) + n_bytes, seal[: -_STATE.size])
            return data
        log.info("packed weights %s are not those of the model; they are made again", path)
        with suppress(OSError):
            path.unlink()
        return None

    def keep(self, entries: Sequence[Entry], data: Bytes) -> None:
        """Begin to write, unless the model is no longer what was read; *data* must stay until close."""
        if data.size < KEPT_FROM_BYTES or data.size > self._limit or not self._origin.is_as_it_was():
            return
        header = _header(self._origin, entries)
        arguments = (self._place(header), header, data)
        self._writer = threading.Thread(target=self._write, args=arguments, name="keep packed weights", daemon=True)
        self._writer.start()

    def _write(self, path: Path, header: bytes, data: Bytes) -> None:
        if hasattr(os, "setpriority"):
            with suppress(OSError):  # of this thread alone, where the system counts those
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        folder, unfinished = path.parent, ""
        try:
            packed_files.remove_former(folder.parent, self._origin.name)
            packed_files.tidy(folder.parent, self._limit, room_for=data.size)
            folder.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(folder).free < 2 * data.size:
                log.info("packed weights are not kept: %s has little room", folder)
                return
            with tempfile.NamedTemporaryFile(
                dir=folder, prefix=f"{path.name}-", suffix=packed_files.UNFINISHED, delete=False
            ) as file:
                unfinished = file.name
                packed_files.hold(file)
                file.write(header)
                digest = _DIGEST()
                for begin in range(0, data.size, _CHUNK_BYTES):
                    if self._is_closed.is_set():
                        return
                    part = data[begin : begin + _CHUNK_BYTES].data
                    digest.update(part)
                    file.write(part)
                    file.flush()
                _seal(file, len(header) + data.size, digest.digest())
                os.fsync(file.fileno())
                os.replace(unfinished, path)
            unfinished = ""
            log.info("packed weights are kept in %s, so that the next load maps them", path)
        except OSError as error:
            log.info("packed weights are not kept: %s", error)
        finally:
            if unfinished:
                with suppress(OSError):
                    os.unlink(unfinished)

    def wait(self) -> None:
        """Until what is being written is there."""
        if self._writer is not None:
            self._writer.join()

    def close(self) -> None:
        """End writing, with what is there of it or without."""
        self._is_closed.set()
        self.wait()


def _digest(data: Bytes) -> bytes:
    return _DIGEST(data.data).digest()


def _state(file: int) -> bytes:
    """Which file it is and when it was last changed, as a seal says it."""
    status = os.fstat(file)
    return _STATE.pack(status.st_ino, status.st_mtime_ns)


def _seal(file: IO[bytes], offset: int, digest: bytes) -> None:
    """As found right now, which is its state from here on: what was not used for longest goes first.

    The time is in whole seconds, which every file system can keep and no change of the file happens at.
    """
    changed_at = int(time.time()) * 10**9
    file.seek(offset)
    file.write(digest + _STATE.pack(os.fstat(file.fileno()).st_ino, changed_at))
    file.flush()
    os.utime(file.fileno(), ns=(changed_at, changed_at))


def _header(origin: Origin, entries: Sequence[Entry]) -> bytes:
    """Whole pages, so that the data begins one."""
    table: list[Any] = [[e.names, e.type_name, e.shape, e.offset, e.n_bytes] for e in entries]
    text = _MAGIC + json.dumps({"of": origin.name, "layout": LAYOUT, "tensors": table}).encode() + b"\n"
    return text.ljust(-(-len(text) // mmap.PAGESIZE) * mmap.PAGESIZE)
