"""Whether the time that something takes grows as its input does: two sizes, side by side, in the time of this thread."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_ROUNDS, _MOST_ROUNDS = 3, 12
_TIMES = 4
LIMIT = 2.5 * _TIMES  # of a work that grows as its input the ratio is 4, of one that grows as its square 16


def growth(make: Callable[[int], T], work: Callable[[T], object], n: int) -> float:
    """How many times as long *work* takes with four times the input: the least of several rounds of either.

    Of more rounds where that is too much: others that use the caches of this core may have slowed down all large ones by chance.
    Nothing is collected meanwhile, which takes as long as all that other tests have left behind is large.
    """
    small, large = make(n), make(_TIMES * n)
    least = [float("inf"), float("inf")]
    gc.collect()
    gc.disable()
    try:
        for number in range(1, _MOST_ROUNDS + 1):
            for place, given in enumerate((small, large)):
                began = time.thread_time()
                work(given)
                least[place] = min(least[place], time.thread_time() - began)
            if number >= _ROUNDS and least[1] < LIMIT * least[0]:
                break
    finally:
        gc.enable()
    return least[1] / least[0]
