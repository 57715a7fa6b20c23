"""On which machine a model is loaded: where it fits, and there where most is free. Sizes are bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from puna.errors import OutOfMemory


@dataclass(frozen=True)
class Room:
    """What a node has."""

    node: str
    free: int
    total: int  # that models may ever take
    idle: int = 0  # taken by models that nobody uses, which leave for others
    has_files: bool = False  # the model's files need not be fetched


def in_order(rooms: Iterable[Room], n_bytes: int) -> list[str]:
    """The nodes to try for a model of that size, best first: those where it fits as it is, then those where idle models leave,
    then those where busy ones would. Nodes that are too small for it are left out.

    Errors: OutOfMemory with the numbers when all of them are.
    """
    rooms = list(rooms)
    fitting = [room for room in rooms if room.total >= n_bytes]
    if not fitting:
        largest = max((room.total for room in rooms), default=0)
        raise OutOfMemory(
            f"the model needs {n_bytes / 1e9:.1f} GB, and the largest of {len(rooms)} nodes has {largest / 1e9:.1f} GB for models"
        )

    def rank(room: Room) -> tuple[int, bool, int, str]:
        lack = 0 if room.free >= n_bytes else 1 if room.free + room.idle >= n_bytes else 2
        return lack, not room.has_files, -room.free, room.node

    return [room.node for room in sorted(fitting, key=rank)]
