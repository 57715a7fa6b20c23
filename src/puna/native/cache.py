"""The user's folder for what can be made again: compiled libraries, verdicts of the self-test."""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress
from pathlib import Path

DAY_S = 24 * 3600.0


def home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "puna"


def use(file: Path) -> None:
    """It was used now: where that cannot be written down it counts as unused."""
    with suppress(OSError):
        os.utime(file)


def tidy(folder: Path, pattern: str, most: int, days: int) -> None:
    """Of the files of this name, those go that were not used for so many days, and of more than *most* those unused for longest.

    What was used within a day stays in any case, and so does what is no file of this user's. Other processes may do the same
    at the same time. Never raises an OSError.
    """
    with suppress(OSError):
        for i, (unused_s, file) in enumerate(sorted((_unused_s(file), file) for file in folder.glob(pattern))):
            if unused_s > days * DAY_S or (i >= most and unused_s > DAY_S):
                file.unlink(missing_ok=True)


def _unused_s(file: Path) -> float:
    """For how long; 0 where it is no file of this user's, or another process has just removed it."""
    try:
        found = file.lstat()
    except OSError:
        return 0.0
    is_own = stat.S_ISREG(found.st_mode) and (not hasattr(os, "getuid") or found.st_uid == os.getuid())
    return time.time() - found.st_mtime if is_own else 0.0
