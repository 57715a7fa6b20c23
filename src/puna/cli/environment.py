"""The table of environment variables in the help texts, made from puna.settings."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

from puna.cli.table import table
from puna.settings import Address, Settings


def environment_help() -> str:
    """Each variable with its meaning and default."""
    rows = []
    defaults = Settings()
    for item in fields(Settings):
        shown = _shown(getattr(defaults, item.name))
        meaning = str(item.metadata["help"])
        rows.append((item.metadata["env"], f"{meaning} (default {shown})" if shown else meaning))
    # \b keeps the help's formatter from filling the table into a paragraph
    return "\b\nEnvironment Variables:\n" + table(rows, indent="  ").rstrip()


def _shown(value: Any) -> str:
    if isinstance(value, Address):
        return value.url
    if isinstance(value, Path):
        home = str(Path.home())
        return str(value).replace(home, "~", 1) if str(value).startswith(home) else str(value)
    if isinstance(value, float):
        return "forever" if math.isinf(value) else f"{value / 60:g}m"
    if isinstance(value, bool):
        return "1" if value else "0"
    return "" if value in ((), 0, "", None) else str(value)
