"""Puna: an Ollama-compatible server with its own inference engine on ggml.

In a Python program: ``from puna import Engine`` (docs/guides/python.md).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Imported when asked for: no command and no server needs them. Their types stand in __init__.pyi.
_HOMES = {
    "AsyncEngine": "puna.local.asynchronous",
    "Engine": "puna.local.engine",
    **dict.fromkeys(("Answer", "Chunk", "Logprob", "Ranked", "ToolCall"), "puna.local.answers"),
}
__all__ = [*_HOMES, "__version__"]


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
