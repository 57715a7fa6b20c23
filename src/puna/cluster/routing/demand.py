"""When a model gets another replica, and when one of several is drained: by the requests that wait, and not at every breath."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

START_AFTER_S = 2.0  # that requests have waited without a break; a load takes longer than to wait for one that ends soon
DRAIN_AFTER_S = 60.0  # that the others could have done all the work


class Change(Enum):
    NONE = "leave it"
    START = "start one more"
    DRAIN = "drain one"


@dataclass(frozen=True)
class Load:
    """Of one replica."""

    node: str
    n_running: int  # those that wait among them
    n_parallel: int

    @property
    def n_waiting(self) -> int:
        return max(0, self.n_running - self.n_parallel)


@dataclass
class Demand:
    """Of one model, over time. *clock* values are seconds."""

    start_after_s: float = START_AFTER_S
    drain_after_s: float = DRAIN_AFTER_S
    _short_since: float | None = field(default=None, init=False)
    _ample_since: float | None = field(default=None, init=False)

    def judge(self, loads: Sequence[Load], now: float) -> Change:
        """What is to be done; it is taken for done, and the time begins anew."""
        is_short = bool(loads) and all(load.n_waiting for load in loads)
        self._short_since = (now if self._short_since is None else self._short_since) if is_short else None
        is_ample = len(loads) > 1 and fits_without(loads, to_drain(loads))
        self._ample_since = (now if self._ample_since is None else self._ample_since) if is_ample else None
        if self._short_since is not None and now - self._short_since >= self.start_after_s:
            self._short_since = None
            return Change.START
        if self._ample_since is not None and now - self._ample_since >= self.drain_after_s:
            self._ample_since = None
            return Change.DRAIN
        return Change.NONE


def to_drain(loads: Sequence[Load]) -> str:
    """The node whose replica has least to do."""
    return min(loads, key=lambda load: (load.n_running, load.node)).node


def fits_without(loads: Sequence[Load], node: str) -> bool:
    """Whether the other replicas could have all requests at once, and half of their places stay free."""
    n_places = sum(load.n_parallel for load in loads if load.node != node)
    return 2 * sum(load.n_running for load in loads) <= n_places
