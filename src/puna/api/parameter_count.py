"""How many parameters a model has, as people say it; a field of the API, and a column of tables."""

from __future__ import annotations


def human_number(count: int) -> str:
    """7B, 8.0B, 134.52M, 26K."""
    for unit, name, digits in ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 0)):
        if count >= unit:
            return f"{count // unit}{name}" if count % unit == 0 else f"{count / unit:.{digits}f}{name}"
    return str(count)
