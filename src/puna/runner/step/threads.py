"""How many threads a step computes with, while other processes want the cores as well.

The threads of a step wait for each other some hundred times, spinning. When another process takes the core of one, all
wait for it while they spin in the way of everyone: with one busy process on two cores, two threads are a third to a
tenth as fast as without it, and one thread is two thirds as fast. What other processes want is told by the system's
accounts of processor time; where that leaves too few cores, fewer threads and all of them are compared by the steps' times:
who seems busy may yield, and on cores that are wanted many times over more threads get a larger share. A count that is asked for
is kept.

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
# One window of each pause goes into trying what seems slower; the pauses double.
TRY_AFTER_S, TRY_AFTER_AT_MOST_S = 2.0, 32.0


def taken_by_others(used: Usage, n_cores: int) -> float:
    """Cores, on average."""
    return min(max(used.busy - used.own, 0.0) / used.wall, float(n_cores)) if used.wall > 0 else 0.0


def demanded_by_others(used: Usage, n_threads: int, n_cores: int) -> float:
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
    """The count for the next step, looked at anew every WINDOW_S. One thread at a time.

    While others leave too few cores, the count that finds cores of its own and the full one take turns: the one whose
    steps were faster stays, the other gets one window of each pause.
    """

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
        self._steps: dict[int, list[float]] = {}  # seconds of this window's steps, by their number of tokens
        self._means: dict[int, dict[int, float]] = {}  # by count: mean seconds of its last window's steps
        self._rival = 0  # the count that is compared with; 0: no other is worth a try
        self._is_trial = False
        self._pause_s = TRY_AFTER_S
        self._try_at = 0.0

    def note(self, n_tokens: int, seconds: float) -> None:
        """A step was computed with ``count`` threads."""
        self._steps.setdefault(n_tokens, []).append(seconds)

    def has_changed(self) -> bool:
        """Look at the accounts if it is time to; whether ``count`` is another than before."""
        if self._clock() - self._before.wall < WINDOW_S:
            return False
        now = self._read_usage()
        used = now.since(self._before)
        self._before, before = now, self.count
        self._means[before] = {n: sum(times) / len(times) for n, times in self._steps.items()}
        self._steps.clear()
        self._choose(used, now.wall)
        return self.count != before

    def _choose(self, used: Usage, now: float) -> None:
        demand = demanded_by_others(used, self.count, self._n_cores)
        fitting = threads_beside(demand, self._most, self._n_cores, _SPARED)
        room = threads_beside(taken_by_others(used, self._n_cores), self._most, self._n_cores, _SPARED_TO_GROW)
        if (fitting if self.count == self._most else room) == self._most:
            self.count, self._rival, self._is_trial = self._most, 0, False
        elif not self._rival:
            self._rival, self.count = self._most, min(fitting, self._most - 1)
            self._pause_s, self._try_at = TRY_AFTER_S, now + TRY_AFTER_S
        elif self._is_trial:
            self._is_trial = False
            self._pause_s = min(self._pause_s * 2, TRY_AFTER_AT_MOST_S)
            self._try_at = now + self._pause_s
            if not self._is_faster(self.count, self._rival):
                self._swap()
        elif now >= self._try_at:
            self._swap()
            self._is_trial = True
        elif self.count < self._most:
            self.count = fitting if fitting < self.count else max(self.count, room)

    def _swap(self) -> None:
        self.count, self._rival = self._rival, self.count

    def _is_faster(self, count: int, other: int) -> bool:
        """By steps of the same size; where there are none, fewer threads are the better guess."""
        ours, theirs = self._means.get(count, {}), self._means.get(other, {})
        common = ours.keys() & theirs.keys()
        if not common:
            return count < other
        return sum(ours[n] for n in common) < sum(theirs[n] for n in common)
