"""When something is tried again: how often, after how long, and when a connection that still lives is given up.

Knows neither files nor what is asked for; time comes from outside.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from puna.errors import SourceError
from puna.store.sources.web.http import Passing, Unreachable

TRIES = 6
BASE_S = 1.0  # 2, 4, 8 … times this
LONGEST_S = 60.0
STALL_S = 30.0
STALLED_BYTES_PER_S = 1024
SLOW_SHARE = 0.1  # of what the others make, over all of STALL_S

T = TypeVar("T")
Sleep = Callable[[float], object]


class Tries:
    """The tries at one thing; what succeeds in between starts the count anew."""

    def __init__(self, n: int = TRIES, dice: Callable[[], float] = random.random) -> None:
        self._n = n
        self._dice = dice
        self.n_used = 0

    def again(self, error: Exception, sleep: Sleep, after_s: float = 0.0) -> None:
        """Wait for the next try, twice as long each time.

        Errors: SourceError when there were enough.
        """
        self.n_used += 1
        if self.n_used >= self._n:
            raise SourceError(f"max retries exceeded: {error}") from error
        sleep(min(max(2**self.n_used * BASE_S, after_s), LONGEST_S) * (0.75 + self._dice() / 2))

    def progressed(self) -> None:
        self.n_used = 0


def persistently(action: Callable[[], T], sleep: Sleep) -> T:
    """Do something short, again when what failed may pass; nobody waits for a host that cannot be reached at all.

    Errors: SourceError; what else *action* raises.
    """
    tries = Tries()
    while True:
        try:
            return action()
        except Unreachable as error:
            raise SourceError(str(error)) from error
        except Passing as error:
            tries.again(error, sleep, error.after_s)


class Pace:
    """How fast one connection is, over the last STALL_S seconds."""

    def __init__(self, now: float, n_bytes: int) -> None:
        self._samples = deque([(now, n_bytes)])

    def note(self, now: float, n_bytes: int) -> None:
        self._samples.append((now, n_bytes))
        while len(self._samples) > 2 and self._samples[1][0] <= now - STALL_S:
            self._samples.popleft()

    @property
    def is_judged(self) -> bool:
        """Whether it has lasted long enough to be called slow."""
        return self._samples[-1][0] - self._samples[0][0] >= STALL_S

    @property
    def bytes_per_s(self) -> float:
        (began, before), (now, after) = self._samples[0], self._samples[-1]
        return (after - before) / (now - began) if now > began else 0.0

    def is_stalled(self, others: list[float]) -> bool:
        """Whether to give the connection up: nearly nothing comes, or hardly any of what the *others* make at the median."""
        if not self.is_judged:
            return False
        usual = sorted(others)[len(others) // 2] if others else 0.0
        return self.bytes_per_s < max(STALLED_BYTES_PER_S, SLOW_SHARE * usual)
