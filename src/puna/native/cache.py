"""The user's folder for what can be made again: compiled libraries, verdicts of the self-test."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "puna"
