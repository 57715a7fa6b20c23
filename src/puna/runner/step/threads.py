"""How a step's threads compute while other processes want the cores as well: how many, and how they wait for each other.

The threads of a step wait for each other some hundred times, looking all the time. When another process takes the core of one,
all wait for it while they look in the way of everyone: with one busy process on two cores, two threads are a third to a
tenth as fast as without it, with many a hundredth. Threads that sleep when they wait are woken at once when they have
something to do, and lose little; where nobody is busy they lose a quarter. Fewer threads lose what those computed that are
missing.

What other processes want is told by the system's accounts of processor time, and sooner by the time that the threads
themselves stood in the queue for a core. While there are too few cores, ways to compute are compared by the steps' times:
who seems busy may yield, and on cores that are wanted many times over more threads get a larger share. A count that is asked
for is kept.

Knows neither the tensor library nor how usage is measured.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from puna.native.usage import Usage, usage

WINDOW_S = 0.25  # the system counts in hundredths of a second
# Steps that took so long together may have been held up: a process that takes a core keeps it for some milliseconds.
HELD_UP_S = 0.008
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
        return demanded_by_queues(used.waited / used.wall, n_threads, n_cores)
    left = max(n_cores - taken, 0.1)
    return min(max(taken, taken * n_threads / left), float(n_cores))


def demanded_by_queues(waiting: float, n_threads: int, n_cores: int) -> float:
    """The same, by how many of our threads stood in the queue for a core on average."""
    run = max(n_threads - waiting, 0.1)
    return min(n_cores * n_threads / run - n_threads, float(n_cores))


def threads_beside(others: float, most: int, n_cores: int, spared: float) -> int:
    """Of *most* threads, as many as find a core of their own."""
    return max(1, min(most, math.floor(n_cores - others + spared)))


class Way(NamedTuple):
    """To compute steps in."""

    n_threads: int
    is_patient: bool  # threads that wait sleep, instead of looking all the time


class Threads:
    """The way of the next step, looked at anew every WINDOW_S, and sooner where steps are held up. One thread at a time.

    While others leave too few cores, three ways take turns: all threads, patient; as many as find cores of their own; and all
    threads as they are when alone. The one whose steps were the fastest stays, another gets one window of each pause.
    """

    def __init__(
        self,
        most: int,
        n_cores: int,
        read_usage: Callable[[], Usage] = usage,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._alone = self._way = Way(most, False)
        self._most = most
        self._n_cores = n_cores
        self._read_usage = read_usage
        self._clock = clock
        self._before = read_usage()
        self._steps: dict[int, list[float]] = {}  # seconds of this window's steps, by their number of tokens
        self._computed_s = 0.0  # all of those
        self._look_s = HELD_UP_S  # when so much was computed, the queues are looked at
        self._means: dict[Way, dict[int, float]] = {}  # mean seconds of a way's last window's steps
        self._rivals: deque[Way] = deque()  # the other ways; none while there are cores for all
        self._stayed: Way | None = None  # the way that a trial is compared with
        self._pause_s = TRY_AFTER_S
        self._try_at = 0.0

    @property
    def count(self) -> int:
        return self._way.n_threads

    @property
    def is_patient(self) -> bool:
        return self._way.is_patient

    def note(self, n_tokens: int, seconds: float) -> None:
        """A step was computed in the present way."""
        self._steps.setdefault(n_tokens, []).append(seconds)
        self._computed_s += seconds

    def has_changed(self) -> bool:
        """Look at the accounts if it is time to; whether the way is another than before."""
        is_over = self._clock() - self._before.wall >= WINDOW_S
        if not is_over and (self._way != self._alone or self._computed_s < self._look_s):
            return False
        now = self._read_usage()
        used = now.since(self._before)
        if is_over:
            demand = demanded_by_others(used, self.count, self._n_cores)
        else:
            self._look_s = 2 * self._computed_s
            demand = demanded_by_queues((used.waited or 0.0) / self._computed_s, self.count, self._n_cores)
            if self._beside(demand, _SPARED) == self._most:
                return False
        self._before, before = now, self._way
        self._means[before] = {n: sum(times) / len(times) for n, times in self._steps.items()}
        self._steps.clear()
        self._computed_s, self._look_s = 0.0, HELD_UP_S
        self._choose(demand, taken_by_others(used, self._n_cores), now.wall)
        return self._way != before

    def _beside(self, others: float, spared: float) -> int:
        return threads_beside(others, self._most, self._n_cores, spared)

    def _choose(self, demand: float, taken: float, now: float) -> None:
        fitting, room = self._beside(demand, _SPARED), self._beside(taken, _SPARED_TO_GROW)
        # Who sleeps does not stand in a queue: there, only what others took tells that they left.
        if (fitting if self._way == self._alone else room) == self._most:
            self._way, self._stayed = self._alone, None
            self._rivals.clear()
        elif not self._rivals:
            self._rivals.extend((Way(min(fitting, self._most - 1), True), self._alone))
            self._way = Way(self._most, True)
            self._pause_s, self._try_at = TRY_AFTER_S, now
        elif self._stayed is not None:
            slower, faster = self._way, self._stayed
            if self._is_faster(slower, faster):
                slower, faster = faster, slower
            self._way, self._stayed = faster, None
            self._rivals.append(slower)
            self._try_at = now + self._pause_s
            self._pause_s = min(self._pause_s * 2, TRY_AFTER_AT_MOST_S)
        elif now >= self._try_at:
            self._stayed, self._way = self._way, self._rivals.popleft()
            if self.count < self._most:
                self._way = Way(min(fitting, room, self._most - 1), True)
        elif self.count < self._most:
            self._way = Way(min(fitting if fitting < self.count else max(self.count, room), self._most - 1), True)

    def _is_faster(self, tried: Way, stayed: Way) -> bool:
        """By steps of the same size; where they take as long, fewer threads."""
        ours, theirs = self._means.get(tried, {}), self._means.get(stayed, {})
        common = ours.keys() & theirs.keys()
        seconds = tuple(sum(means[n] for n in common) for means in (ours, theirs))
        return bool(common) and (seconds[0] < seconds[1] or (seconds[0] == seconds[1] and tried.n_threads < stayed.n_threads))
