"""What a table of measurements must say about where it was made."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from typing import Any

from puna import __version__
from puna.native.library import opened


def facts() -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "puna": __version__,
        "commit": _commit(),
        "ggml": opened().version,
        "cpu": _cpu_model(),
        "flags": [f for f in _cpu_flags() if f.startswith(("avx", "amx", "f16c", "fma"))],
        "python": platform.python_version(),
    }


def _commit() -> str:
    result = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return result.stdout.strip()


def _cpuinfo(key: str) -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")
    except OSError:
        return ""


def _cpu_model() -> str:
    return _cpuinfo("model name") or platform.processor()


def _cpu_flags() -> list[str]:
    return _cpuinfo("flags").split()
