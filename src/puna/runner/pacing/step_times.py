"""What steps of this model take on this machine at this time, learnt from those that were computed.

The time of a step is taken for a sum: so much for the step, for each row, and for each cell that a row attends to. The prices
come from least squares over relative errors, so that a step that was interrupted, which took many times as long, counts for
next to nothing, and older steps count ever less. How busy the machine is right now shows in the last steps alone: by which
factor they took longer than the prices say. The prices are those of the machine as it was at first, so that a change of its speed
is not taken for one of the model's shape.

Knows neither requests nor clocks.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from puna.runner.pacing.pace import FIRST_TOKENS, GROWTH, Pace, Prices, Work

# Steps without prompts and steps with them are forgotten apart: a long answer must not wipe out what prompts cost. Of the steps
# of one kind about the last 1 / (1 - KEPT) count.
KEPT = 0.98

# The last steps, of which a quarter may have been interrupted.
RECENT = 16

# Steps that took so many times more or less than predicted are of a machine that has changed: they say how busy it is, and only
# when that is known again what a part of a step costs.
SURPRISING = 1.5

# A feature that always comes with another cannot be told from it; then both share the cost. Relative to its own weight.
_RIDGE = 1e-6

# Cells are counted in thousands, which keeps the equations in range.
_UNITS = np.array([1.0, 1.0, 1.0, 1.0, 1024.0])

Floats = npt.NDArray[np.float64]


class StepTimes:
    def __init__(self, target_s: float) -> None:
        """*target_s*: how long those who decode may wait for a step."""
        self._target_s = target_s
        self._sums = {has_prompt: (np.zeros((5, 5)), np.zeros(5)) for has_prompt in (False, True)}
        self._n_learnt = {False: 0, True: 0}
        self._recent: deque[tuple[Work, float]] = deque(maxlen=RECENT)
        self._n_new = 0  # of the recent ones, those that the sums do not hold yet
        self._most_tried = 0  # tokens of prompts in a step

    def note(self, done: Work, seconds: float) -> None:
        """Of steps that only decode, which are many and short, the last ones are looked at when a pace is asked for."""
        if seconds <= 0:
            return
        self._recent.append((done, seconds))
        self._n_new = min(self._n_new + 1, RECENT)
        if done.prompt:
            self._most_tried = max(self._most_tried, done.prompt)
            self._learn()

    def _learn(self) -> None:
        prices = self._prices()
        slowness = self._slowness(prices, 0.5)
        for done, seconds in list(self._recent)[len(self._recent) - self._n_new :]:
            features = _scaled(done) * (slowness / seconds)
            surprise = max(float(features @ prices), 1e-9)
            kind = done.prompt > 0
            if self._n_learnt[kind] >= RECENT and not 1 / SURPRISING < surprise < SURPRISING:
                continue
            self._n_learnt[kind] += 1
            squares, products = self._sums[kind]
            squares *= KEPT
            squares += np.outer(features, features)
            products *= KEPT
            products += features
        self._n_new = 0

    @property
    def pace(self) -> Pace:
        """For the next step."""
        self._learn()
        prices = self._prices()
        now = Prices(*(prices * self._slowness(prices, 0.75) / _UNITS).tolist())
        return Pace(self._target_s, now, max(FIRST_TOKENS, GROWTH * self._most_tried))

    def _prices(self) -> Floats:
        (squares, products), (more_squares, more_products) = self._sums.values()
        squares = squares + more_squares
        return _not_negative(squares + np.diag(_RIDGE * np.diag(squares)), products + more_products)

    def _slowness(self, prices: Floats, share: float) -> float:
        """By what factor this share of the recent steps took at most longer than the prices say."""
        ratios = sorted(seconds / predicted for done, seconds in self._recent if (predicted := float(_scaled(done) @ prices)) > 0)
        return ratios[int(share * (len(ratios) - 1))] if ratios else 1.0


def _scaled(done: Work) -> Floats:
    scaled: Floats = np.array(done.features) / _UNITS
    return scaled


def _not_negative(squares: Floats, products: Floats) -> Floats:
    """The solution of the equations, without those features that would get a price below 0 or were never seen."""
    solution = np.zeros(len(products))
    used = np.flatnonzero(np.diag(squares) > 0)
    while len(used):
        found = np.linalg.solve(squares[np.ix_(used, used)], products[used])
        if found.min() >= 0:
            solution[used] = found
            break
        used = np.delete(used, found.argmin())
    return solution
