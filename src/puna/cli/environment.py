"""The tables of environment variables in the help texts, made from puna.settings."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

from puna.cli.table import table
from puna.settings import ELSEWHERE, UNSUPPORTED, Address, Settings


def environment_tables() -> dict[str, list[tuple[str, str]]]:
    """Titles, and under each the names of variables with their meaning."""
    rows = []
    defaults = Settings()
    for item in fields(Settings):
        shown = _shown(getattr(defaults, item.name))
        meaning = str(item.metadata["help"])
        rows.append((item.metadata["env"], f"{meaning} (default {shown})" if shown else meaning))
    return {
        "Environment Variables": rows,
        "Passed on to what reads them": list(ELSEWHERE.items()),
        "Ollama's, not supported": list(UNSUPPORTED.items()),
    }


def environment_help() -> str:
    """Each variable with its meaning and default."""
    tables = environment_tables().items()
    # \b keeps the help's formatter from filling a table into a paragraph
    return "\n\n".join(f"\b\n{title}:\n{table(lines, indent='  ').rstrip()}" for title, lines in tables)


def _shown(value: Any) -> str:
    if isinstance(value, Address):
        return value.url
    if isinstance(value, Path):
        home = str(Path.home())
        return str(value).replace(home, "~", 1) if str(value).startswith(home) else str(value)
    if isinstance(value, float):
        return "forever" if math.isinf(value) else f"{value / 60:g}m" if value >= 60 else f"{value:g}s"
    if isinstance(value, bool):
        return "1" if value else "0"
    return "" if value in ((), 0, "", None) else str(value)
