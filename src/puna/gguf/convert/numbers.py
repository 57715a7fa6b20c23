"""Numbers out of JSON objects that nobody vouches for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from puna.errors import FileFormatError

MAX_NUMBER = 1e30  # far from what a 32-bit float cannot hold


def number(options: Mapping[str, Any], name: str, default: float) -> float:
    """Errors: FileFormatError naming the field of config.json."""
    value = options.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not -MAX_NUMBER < value < MAX_NUMBER:
        raise FileFormatError(f"config.json: {name} is {str(value)[:60]}, not a number")
    return float(value)


def positive(options: Mapping[str, Any], name: str) -> float:
    """A number that must be there.

    Errors: FileFormatError naming the field of config.json.
    """
    if options.get(name) is None:
        raise FileFormatError(f"config.json: {name} is missing")
    value = number(options, name, 0.0)
    if not 0 < value < 1 << 31:
        raise FileFormatError(f"config.json: {name} is {value}")
    return value


def check_range(fields: object, limits: Mapping[str, int]) -> None:
    """Whole numbers from 1 to a limit each, as attributes of *fields*.

    Errors: FileFormatError naming the field of config.json.
    """
    for name, limit in limits.items():
        if not 0 < getattr(fields, name) <= limit:
            raise FileFormatError(f"config.json: {name} is {getattr(fields, name)}, not from 1 to {limit}")
