"""Tidying at start-up: blobs nobody uses, unfinished files of crashed programs, old spellings of blob names.

Knows not which blobs are used and who is at work: the store says. What Puna's own dead work left goes at once, what its live
work makes stays however old it is. Anything else that is younger than an hour may be another program's work in progress, and
stays.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from puna.errors import StoreError
from puna.store.disk.files import names_in
from puna.store.disk.partial import is_held

log = logging.getLogger(__name__)

GRACE_S = 3600.0
FETCHED_S = 24 * 3600.0  # how long what was fetched of a blob waits for the next try
TEMPORARY = "tmp"  # below the root: where sources put files on their way into the store

_LEGACY = re.compile(r"sha256:[0-9a-f]{64}")
_WHOLE = re.compile(r"sha256-[0-9a-f]{64}")
_UNFINISHED = re.compile(r"sha256-[0-9a-zA-Z]{1,40}")
_PARTIAL = re.compile(r"(sha256-[0-9a-f]{64})-partial(-[0-9]+)?")
# whose an unfinished file or a temporary folder is
_OWN = re.compile(r"(?:sha256-|[a-z]+-)(?P<key>[0-9a-f]{16})(?:[0-9a-f]{16}|-.*)")


@dataclass(frozen=True)
class Needs:
    """What must stay, and what need not even wait."""

    kept: Collection[str]  # digests that a manifest names, or live work relies on
    abandoned: Collection[str]  # digests that dead work brought
    live: Collection[str]  # ids of work that goes on


def rename_legacy_blobs(folder: Path) -> None:
    """Blobs were once named with a colon."""
    for path in _files(folder):
        if _LEGACY.fullmatch(path.name):
            wanted = path.with_name(path.name.replace(":", "-"))
            _attempt(path, functools.partial(path.replace, wanted))


def remove_stale(root: Path, needs: Needs) -> None:
    """Remove what no manifest needs and nobody is working on."""
    latest = time.time() - GRACE_S
    kept = {digest.replace(":", "-") for digest in needs.kept}
    abandoned = {digest.replace(":", "-") for digest in needs.abandoned}
    _remove_partials(_files(root / "blobs"), kept)
    for path in _files(root / "blobs"):
        is_ours = _WHOLE.fullmatch(path.name) or _UNFINISHED.fullmatch(path.name)
        if is_ours and path.name not in kept and (path.name in abandoned or _is_over(path, needs, latest)):
            log.info("removing unused blob %s", path.name)
            _attempt(path, path.unlink)
    for path in _files(root / TEMPORARY):
        if _is_over(path, needs, latest):
            _attempt(path, functools.partial(shutil.rmtree, path) if path.is_dir() else path.unlink)
    with suppress(OSError):  # it is not there, or not empty
        (root / TEMPORARY).rmdir()
    _remove_empty(root / "manifests")


def _remove_partials(paths: Collection[Path], kept: Collection[str]) -> None:
    """Blobs that were on their way: as long as one part of one is young, or somebody wants the blob, all of it stays.

    One that is here whole nobody wants a second time; who had begun it then may have died.
    """
    latest = time.time() - FETCHED_S
    groups: dict[str, list[Path]] = {}
    whole = {path.name for path in paths}
    for path in paths:
        if match := _PARTIAL.fullmatch(path.name):
            groups.setdefault(match[1], []).append(path)
    for name, files in groups.items():
        is_wanted = name in kept and name not in whole
        if not is_wanted and all(_is_older(path, latest) for path in files) and not _is_held(files):
            for path in files:
                _attempt(path, path.unlink)


def _is_held(files: Collection[Path]) -> bool:
    try:
        return any(is_held(path) for path in files)
    except OSError as error:
        log.warning("cannot tell who works on %s: %s", sorted(files)[0], error.strerror)
        return True


def _is_over(path: Path, needs: Needs, latest: float) -> bool:
    """Whether nobody works on a file; where its name does not tell, its age has to."""
    own = _OWN.fullmatch(path.name)
    return own["key"] not in needs.live if own else _is_older(path, latest)


def _files(folder: Path) -> list[Path]:
    try:
        return [folder / name for name in names_in(folder)]
    except StoreError as error:
        log.warning("cannot tidy up: %s", error)
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
