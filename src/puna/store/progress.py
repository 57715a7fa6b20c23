"""What a long operation of the store says while it runs.

Knows not who listens: a report function is called from the working thread, and it ends the work by raising Cancelled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Progress:
    """One status line; *digest*, *total* and *completed* (bytes) only where something of known size moves."""

    status: str
    digest: str = ""
    total: int = 0
    completed: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The JSON form: what is empty or zero is left out."""
        fields: dict[str, Any] = {"status": self.status}
        fields.update((key, value) for key in ("digest", "total", "completed") if (value := getattr(self, key)))
        return fields


Report = Callable[[Progress], None]


class Cancelled(Exception):  # an order, not an error
    """Raised by a report function when nobody wants the result any more."""


def silent(progress: Progress) -> None:
    """Report to nobody."""
