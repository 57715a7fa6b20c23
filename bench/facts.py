"""What a table of measurements must say about where it was made."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from typing import Any

from puna import __version__
from puna.native.cpu import model
from puna.native.library import opened


def facts() -> dict[str, Any]:
    cpu = model()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "puna": __version__,
        "commit": _commit(),
        "ggml": opened().version,
        "cpu": cpu.name,
        "flags": " ".join(cpu.mattering_flags),
        "python": platform.python_version(),
    }


def _commit() -> str:
    result = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return result.stdout.strip()
