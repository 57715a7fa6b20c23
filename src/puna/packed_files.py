"""Packed weights kept on disk beside the models they were made from: where, and which of them go.

Below the folder of models, ``packed/sha256-<digest>.<how>`` belongs to the blob ``blobs/sha256-<digest>``. It is a copy that
can be made again, so anything here may be removed at any time; who has a file mapped keeps what it maps. Knows nothing of what
is in the files.
"""

from __future__ import annotations

import logging
import re
import time
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

FOLDER = "packed"
UNFINISHED = ".unfinished"  # how the name of a file ends while it is written
_GRACE_S = 3600.0
_BLOB = re.compile(r"sha256-[0-9a-f]{64}")


def place_of(blob: Path, how: str) -> Path | None:
    """Where the packed weights of a model's file are kept; None for files outside of a folder of models."""
    if not _BLOB.fullmatch(blob.name) or blob.parent.name != "blobs":
        return None
    return blob.parent.parent / FOLDER / f"{blob.name}.{how}"


def remove(root: Path, digest: str) -> None:
    """What is kept of one blob of the folder of models *root*."""
    for path in _files(root / FOLDER):
        if path.name.startswith(digest.replace(":", "-") + "."):
            _remove(path)


def tidy(root: Path, limit: int, *, room_for: int = 0) -> None:
    """Remove what belongs to no blob, what nobody finished, and what was not used for longest until *limit* bytes hold the rest.

    *room_for* bytes are about to be added.
    """
    kept = []
    for path in _files(root / FOLDER):
        with suppress(OSError):
            status = path.stat()
            is_dead = path.name.endswith(UNFINISHED) and status.st_mtime < time.time() - _GRACE_S
            if is_dead or not (root / "blobs" / path.name.partition(".")[0]).exists():
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


def _files(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if _BLOB.match(path.name)]
    except OSError:
        return []


def _remove(path: Path) -> None:
    log.debug("removing packed weights %s", path.name)
    with suppress(OSError):
        path.unlink()
