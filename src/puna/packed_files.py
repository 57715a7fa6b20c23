"""Packed weights kept on disk: where, and which of them go.

Below the folder of models, ``packed/sha256-<digest>.<how>`` belongs to the blob ``blobs/sha256-<digest>``, and
``packed/file-<path>-<state>.<how>`` to a file that lies elsewhere, in one state of it. They are copies that can be made again, so
anything here may be removed at any time; who has a file mapped keeps what it maps. Knows nothing of what is in the files.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

log = logging.getLogger(__name__)

FOLDER = "packed"
UNFINISHED = ".unfinished"  # how the name of a file ends while it is written
_GRACE_S = 3600.0  # for what is written where there are no locks
# Of files elsewhere. Whether one is still there is not asked: its disk may be another machine's, which does not answer.
_FORGOTTEN_S = 30 * 24 * 3600.0
_DIGITS = 32
_BLOB = re.compile(r"sha256-[0-9a-f]{64}")
_NAME = re.compile(rf"({_BLOB.pattern}|file-[0-9a-f]{{{_DIGITS}}}-[0-9a-f]{{{_DIGITS}}})\..+")


def root_of(path: Path) -> Path | None:
    """The folder of models that a file is a blob of; None for files outside of one."""
    return path.parent.parent if _BLOB.fullmatch(path.name) and path.parent.name == "blobs" else None


def name_of_file(path: str, state: tuple[int, ...]) -> str:
    """What stands for a file that is no blob, in one state of it."""
    parts = (os.fsencode(path), repr(state).encode())
    return "-".join(["file", *(hashlib.sha256(part).hexdigest()[:_DIGITS] for part in parts)])


def place_of(root: Path, name: str, how: str) -> Path:
    """Where packed weights of a blob, or of a file in one state, are kept."""
    return root / FOLDER / f"{name}.{how}"


def remove(root: Path, digest: str) -> None:
    """What is kept of one blob of the folder of models *root*."""
    for path in _files(root / FOLDER):
        if path.name.startswith(digest.replace(":", "-") + "."):
            _remove(path)


def remove_former(root: Path, name: str) -> None:
    """What is kept of a file in other states than the one that *name* stands for."""
    if _BLOB.fullmatch(name):
        return  # which has no other state
    same_file, _, state = name.rpartition("-")
    for path in _files(root / FOLDER):
        if path.name.startswith(f"{same_file}-") and not path.name.startswith(f"{same_file}-{state}."):
            _remove(path)


def hold(unfinished: IO[bytes]) -> None:
    """Say that it is being written, until it is closed or the process has ended in whatever way."""
    with suppress(OSError):
        fcntl.flock(unfinished, fcntl.LOCK_EX | fcntl.LOCK_NB)


def tidy(root: Path, limit: int, *, room_for: int = 0) -> None:
    """Remove what belongs to no blob, what nobody finished, what belongs to a file elsewhere and was not used for a month, and
    what was not used for longest until *limit* bytes hold the rest.

    *room_for* bytes are about to be added.
    """
    kept = []
    for path in _files(root / FOLDER):
        with suppress(OSError):
            status = path.stat()
            if _is_dead(root, path, time.time() - status.st_mtime):
                _remove(path)
            else:
                kept.append((status.st_mtime, status.st_size, path))
    total = room_for + sum(size for _, size, _ in kept)
    for _, size, path in sorted(kept):
        if total > limit and not path.name.endswith(UNFINISHED):
            _remove(path)
            total -= size
    with suppress(OSError):  # it is not there, or not empty
        (root / FOLDER).rmdir()


def n_bytes(root: Path) -> int:
    """What all of them take."""
    total = 0
    for path in _files(root / FOLDER):
        with suppress(OSError):
            total += path.stat().st_size
    return total


def _is_dead(root: Path, path: Path, age_s: float) -> bool:
    if path.name.endswith(UNFINISHED) and (age_s > _GRACE_S or not _is_held(path)):
        return True
    owner = path.name.partition(".")[0]
    return not (root / "blobs" / owner).exists() if _BLOB.fullmatch(owner) else age_s > _FORGOTTEN_S


def _is_held(unfinished: Path) -> bool:
    """Also where that cannot be told."""
    with open(unfinished, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _files(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    except OSError:
        return []


def _remove(path: Path) -> None:
    log.debug("removing packed weights %s", path.name)
    with suppress(OSError):
        path.unlink()
