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
# Who seems to want a core may yield when we do: only a try shows it. One window of each pause goes into trying.
TRY_AFTER_S, TRY_AFTER_AT_MOST_S = 4.0, 32.0


def taken_by_others(used: Usage, n_cores: int) -> float:
    """Cores, on average."""
    return min(max(used.busy - used.own, 0.0) / used.wall, float(n_cores)) if used.wall > 0 else 0.0


def wanted_by_others(used: Usage, n_threads: int, n_cores: int) -> float:
    """Cores that other processes would use if they were free.

    Where cores are short, h others beside n of ours on N cores leave us n N / (n + h) of them: the time that our threads
    wait tells h, with whatever shares the system gives. Where it does not say, equal shares are supposed.
    """
    taken = taken_by_others(used, n_cores)
    ours = used.own / used.wall if used.wall > 0 else 0.0
    if taken + ours < n_cores - _SPARED_TO_GROW:
        return taken  # there were cores to spare: nobody had to share
    if used.waited is not None:
        run = max(n_threads - used.waited / used.wall, 0.1)
        return min(n_cores * n_threads / run - n_threads, float(n_cores))
    left = max(n_cores - taken, 0.1)
    return min(max(taken, taken * n_threads / left), float(n_cores))


def threads_beside(others: float, most: int, n_cores: int, spared: float) -> int:
    """Of *most* threads, as many as find a core of their own."""
    return max(1, min(most, math.floor(n_cores - others + spared)))


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
        self._is_trying = False
        self._pause_s = TRY_AFTER_S
        self._try_at = 0.0

    def has_changed(self) -> bool:
        """Look at the accounts if it is time to; whether ``count`` is another than before."""
        if self._clock() - self._before.wall < WINDOW_S:
            return False
        now = self._read_usage()
        used = now.since(self._before)
        self._before, before = now, self.count
        wanted = wanted_by_others(used, before, self._n_cores)
        fitting = threads_beside(wanted, self._most, self._n_cores, _SPARED)
        if fitting < before:
            self._give_way(fitting, now.wall)
        else:
            self._return(taken_by_others(used, self._n_cores), now.wall)
        return self.count != before

    def _give_way(self, count: int, now: float) -> None:
        self.count = count
        self._pause_s = min(self._pause_s * 2, TRY_AFTER_AT_MOST_S) if self._is_trying else TRY_AFTER_S
        self._try_at = now + self._pause_s
        self._is_trying = False

    def _return(self, taken: float, now: float) -> None:
        """To as many as there is room for; with one more, if the last try went well or is long ago."""
        room = threads_beside(taken, self._most, self._n_cores, _SPARED_TO_GROW)
        has_succeeded, self._is_trying = self._is_trying, False
        if room > self.count:
            self.count = room
        elif self.count < self._most and (has_succeeded or now >= self._try_at):
            self.count += 1
            self._is_trying = True
