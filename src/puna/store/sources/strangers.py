"""Model files that other programs keep on this machine: the hub's cache and LM Studio's folder.

They are shown, and run where they lie; nothing is ever changed there.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from puna.errors import PunaError
from puna.store.models.details import read_details

log = logging.getLogger(__name__)

MAX_FOLDERS = 20_000  # a cache may hold much else, and a person waits


@dataclass(frozen=True)
class Stranger:
    """A file with a whole language model, which ``puna run`` takes by its path."""

    path: Path
    n_bytes: int
    modified_at: float  # seconds since 1970
    family: str
    quantization: str


def find(folders: Iterable[Path]) -> list[Stranger]:
    """Models below these folders, the newest first; of several names of one file the one that was made last."""
    found: dict[tuple[int, int], tuple[float, Path]] = {}
    for path in (path for folder in folders for path in _files(folder)):
        try:
            there, made_at = path.stat(), path.lstat().st_ctime
        except OSError:  # a link that leads nowhere
            continue
        key = (there.st_dev, there.st_ino)
        found[key] = max(found.get(key, (0.0, path)), (made_at, path))
    models = [model for _, path in found.values() if (model := _looked_at(path))]
    return sorted(models, key=lambda model: (-model.modified_at, model.path))


def _looked_at(path: Path) -> Stranger | None:
    """None for what holds no language model, or only a part of one."""
    try:
        details, there = read_details(path), path.stat()
    except (PunaError, OSError) as error:
        log.info("%s is not shown: %s", path, error)
        return None
    if details.kind != "model" or details.n_splits > 1:
        return None
    return Stranger(path, there.st_size, there.st_mtime, details.architecture, details.file_type)


def _files(root: Path) -> Iterator[Path]:
    """Files whose names say GGUF; links are followed to files, not to folders."""
    todo, n_left = [root.expanduser().absolute()], MAX_FOLDERS
    while todo and n_left:
        folder, n_left = todo.pop(), n_left - 1
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                todo.append(folder / entry.name)
            elif entry.name.lower().endswith(".gguf"):
                yield folder / entry.name
