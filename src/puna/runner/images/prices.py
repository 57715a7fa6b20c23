"""How long work between two steps takes, learnt from what was computed before."""

from __future__ import annotations

from collections.abc import Hashable

# Of what was learnt, the share that the newest measurement does not replace.
_KEPT = 0.5

# By what factor more rows of a kind than ever was tried there may be at once; the first are as few as may be.
GROWTH = 4

_MOST_LEARNT = 1024  # kinds; shapes are as many as images have sizes


class Prices:
    """Seconds of a row of each kind, or of whatever else is of one kind."""

    def __init__(self) -> None:
        self._seconds: dict[Hashable, float] = {}
        self._tried: dict[Hashable, int] = {}  # the most rows of a kind at once

    def __contains__(self, kind: Hashable) -> bool:
        return kind in self._seconds

    def of(self, kind: Hashable, unknown: float) -> float:
        return self._seconds.get(kind, unknown)

    def n_rows(self, kind: Hashable, seconds: float) -> int:
        """As many as take no longer, as far as is known; 0 of a kind that is not."""
        if kind not in self._seconds:
            return 0
        return min(int(max(seconds, 0.0) / max(self._seconds[kind], 1e-12)), GROWTH * self._tried.get(kind, 0))

    def learn(self, kind: Hashable, seconds: float) -> None:
        before = self._seconds.pop(kind, None)
        self._seconds[kind] = seconds if before is None else _KEPT * before + (1 - _KEPT) * seconds
        if len(self._seconds) > _MOST_LEARNT:
            del self._seconds[next(iter(self._seconds))]

    def learn_rows(self, kind: Hashable, n: int, seconds: float) -> None:
        """So many of them at once took so long."""
        self.learn(kind, seconds / n)
        self._tried[kind] = max(n, self._tried.get(kind, 0))
