"""The value of ``--think`` and ``/set think``."""

from __future__ import annotations

from puna.errors import BadRequest

LEVELS = ("high", "medium", "low", "max")


def parse_think(text: str) -> bool | str:
    """True, False or a level.

    Errors: BadRequest for anything else.
    """
    if text in LEVELS:
        return text
    if text in ("", "true"):
        return True
    if text == "false":
        return False
    raise BadRequest(f'invalid value for --think: "{text}" (must be true, false, high, medium, low, or max)')
