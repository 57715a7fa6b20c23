"""Tidying at start-up: blobs nobody uses, unfinished files of crashed programs, old spellings of blob names.

Knows not which blobs are used: the store says. Anything younger than an hour may belong to work in progress, and stays.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path

log = logging.getLogger(__name__)

GRACE_S = 3600.0
TEMPORARY = "tmp"  # below the root: where sources put files on their way into the store

_LEGACY = re.compile(r"sha256:[0-9a-f]{64}")
_WHOLE = re.compile(r"sha256-[0-9a-f]{64}")
_UNFINISHED = re.compile(r"sha256-([0-9a-f]{64}-partial(-[0-9]+)?|[0-9a-zA-Z]{1,40})")


def rename_legacy_blobs(folder: Path) -> None:
    """Blobs were once named with a colon."""
    for path in _files(folder):
        if _LEGACY.fullmatch(path.name):
            wanted = path.with_name(path.name.replace(":", "-"))
            _attempt(path, functools.partial(path.replace, wanted))


def remove_stale(root: Path, used: Collection[str]) -> None:
    """Remove what no manifest needs and nobody is working on; *used* holds digests."""
    latest = time.time() - GRACE_S
    kept = {digest.replace(":", "-") for digest in used}
    for path in _files(root / "blobs"):
        is_ours = _WHOLE.fullmatch(path.name) or _UNFINISHED.fullmatch(path.name)
        if is_ours and path.name not in kept and _is_older(path, latest):
            log.info("removing unused blob %s", path.name)
            _attempt(path, path.unlink)
    for path in _files(root / TEMPORARY):
        if _is_older(path, latest):
            _attempt(path, functools.partial(shutil.rmtree, path) if path.is_dir() else path.unlink)
    _remove_empty(root / "manifests")


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _is_older(path: Path, latest: float) -> bool:
    try:
        return path.lstat().st_mtime < latest
    except OSError:
        return False


def _attempt(path: Path, action: Callable[[], object]) -> None:
    try:
        action()
    except OSError as error:
        log.warning("cannot tidy up %s: %s", path, error.strerror)


def _remove_empty(root: Path) -> None:
    for folder, _, _ in os.walk(root, topdown=False):
        if Path(folder) != root:
            try:
                os.rmdir(folder)
            except OSError:
                continue
