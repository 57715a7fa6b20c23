"""How many threads a step computes with, while other processes want the cores as well.

The threads of a step wait for each other some hundred times, spinning. When another process takes the core of one, all
wait for it while they spin in the way of everyone: with one busy process on two cores, two threads are a third to a
tenth as fast as without it, and one thread is two thirds as fast. So there are never more threads than cores left.
What other processes want is told by the system's accounts of processor time. (Steps take times that differ by
batch and history, so those tell less.) With another count, attention over a long history sums in another order, and
the last bits of logits differ; a count that is asked for is kept.

Knows neither the tensor library nor how usage is measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from puna.native.usage import Usage, usage

WINDOW_S = 0.25  # the system counts in hundredths of a second
# A process that wants less than this of a core hurts less than a thread less would.
_SPARED = 0.6
_SPARED_TO_GROW = 0.4  # less, so that the count does not swing


def wanted_by_others(used: Usage, n_threads: int, n_cores: int) -> float:
    """Cores that other processes would use if they were free.

    While our threads run, the system shares full cores evenly among all that compute: h others beside n of ours on N
    cores get N h / (n + h) of them.
    """
    if used.wall <= 0:
        return 0.0
    taken = min(max(used.busy - used.own, 0.0) / used.wall, float(n_cores))
    ours = min(used.own / used.wall, float(n_threads))
    if taken + ours < n_cores - _SPARED_TO_GROW:
        return taken  # there were cores to spare: nobody had to share
    left = max(n_cores - taken, 0.1)
    return min(max(taken, taken * n_threads / left), float(n_cores))


def threads_beside(others: float, most: int, n_cores: int, n_now: int) -> int:
    """Of *most* threads, as many as find a core of their own; all of them when nobody else wants one."""

    def count(spared: float) -> int:
        return max(1, min(most, math.floor(n_cores - others + spared)))

    wanted = count(_SPARED)
    return wanted if wanted <= n_now else max(n_now, count(_SPARED_TO_GROW))


class Threads:
    """The count for the next step, looked at anew every WINDOW_S. One thread at a time."""

    def __init__(
        self,
        most: int,
        n_cores: int,
        read_usage: Callable[[], Usage] = usage,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.count = most
        self._most = most
        self._n_cores = n_cores
        self._read_usage = read_usage
        self._clock = clock
        self._before = read_usage()

    def has_changed(self) -> bool:
        """Look at the accounts if it is time to; whether ``count`` is another than before."""
        if self._clock() - self._before.wall < WINDOW_S:
            return False
        now = self._read_usage()
        others = wanted_by_others(now.since(self._before), self.count, self._n_cores)
        self._before, before = now, self.count
        self.count = threads_beside(others, self._most, self._n_cores, before)
        return self.count != before
