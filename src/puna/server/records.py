"""What is left of a generation that has ended, for whoever follows them one by one. Times are of the monotonic clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from puna import wire


@dataclass(frozen=True)
class Record:
    model: str
    request_id: str
    trace_headers: Sequence[tuple[str, str]]
    began_ns: int
    placed_ns: int  # 0: its model was never loaded
    ended_ns: int
    outcome: str  # ok, error or cancelled
    done: wire.Done | None


Follow = Callable[[Record], None]
