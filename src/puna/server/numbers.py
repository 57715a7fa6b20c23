"""Numbers by labels: counts and levels, spreads over ranges, and totals of what others count. Knows neither what is counted nor
how numbers are shown.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

Values = tuple[str, ...]  # of labels
MAX_SOURCES = 1 << 12  # of which something was heard last; far more than ever live at once


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


class Totals:
    """Sums of what sources count of themselves, one that has ended included.

    Each counts from nothing, and its counts end with it. A sum of those that live would fall then, and whoever reads counters
    takes that for a new beginning and computes rates of work that nobody did.
    """

    def __init__(self, max_sources: int = MAX_SOURCES) -> None:
        self.sums: defaultdict[str, Counter[str]] = defaultdict(Counter)  # by name, and then by label
        self._max_sources = max_sources
        self._last: OrderedDict[Hashable, dict[str, int]] = OrderedDict()  # heard last comes last

    def heard(self, source: Hashable, label: str, counts: Mapping[str, int]) -> None:
        """What it has counted so far: that counts once, also when less comes late or the same comes twice."""
        before = self._last.pop(source, {})
        now = self._last[source] = {name: max(count, before.get(name, 0)) for name, count in counts.items()}
        for name, count in now.items():
            self.sums[name][label] += count - before.get(name, 0)
        while len(self._last) > self._max_sources:
            self._last.popitem(last=False)
