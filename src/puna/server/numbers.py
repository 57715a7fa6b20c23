"""Numbers by labels: counts and levels, and spreads over ranges. Knows neither what is counted nor how numbers are shown."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

Values = tuple[str, ...]  # of labels


@dataclass(frozen=True, eq=False)
class Number:
    """A count only grows; a level goes up and down."""

    name: str
    help: str
    labels: Sequence[str] = ()
    is_level: bool = False
    values: dict[Values, float] = field(default_factory=dict)

    def add(self, *labels: str, amount: float = 1.0) -> None:
        self.values[labels] = self.values.get(labels, 0.0) + amount


class Series:
    """What was observed with the same labels."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # by range; the last has no upper bound
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value


@dataclass(frozen=True, eq=False)
class Spread:
    """How many values lay between which *bounds*, the upper ones included."""

    name: str
    help: str
    labels: Sequence[str]
    bounds: Sequence[float]
    values: dict[Values, Series] = field(default_factory=dict)

    def of(self, *labels: str) -> Series:
        if labels not in self.values:
            self.values[labels] = Series(self.bounds)
        return self.values[labels]
