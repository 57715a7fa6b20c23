"""What a step costs and how long it may take: arithmetic over prices, which puna.runner.pacing.step_times measures."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

# Of the time that a step may take, prompts get this part even where those who decode take nearly all of it.
LEAST_PART = 0.25

# Prompt tokens beside those who decode as long as nothing is known, and by what factor more than ever was tried a step may
# have: what a machine does with more is then known from what it did with half as many.
FIRST_TOKENS, GROWTH = 32, 2


class Work(NamedTuple):
    """What a step computes, in what its time depends on."""

    decoded: int = 0  # rows of those who get one token
    prompt: int = 0  # rows of the others
    cells: float = 0  # earlier tokens that rows attend to, all rows together

    @property
    def features(self) -> tuple[float, ...]:
        """What the prices, in their order, are to be multiplied with."""
        return (1.0, float(self.prompt > 0), *self)


def work(parts: Iterable[tuple[int, int]]) -> Work:
    """Of tokens computed before and tokens in this step, for each request."""
    decoded = prompt = 0
    cells = 0.0
    for begin, count in parts:
        cells += count * (begin + count / 2)
        if count == 1:
            decoded += 1
        else:
            prompt += count
    return Work(decoded, prompt, cells)


class Prices(NamedTuple):
    """Seconds, none below 0; what was never measured costs nothing."""

    step: float = 0.0
    prompts: float = 0.0  # once, for a step with a prompt: its graph is new
    decoded: float = 0.0
    prompt: float = 0.0
    cell: float = 0.0

    def of(self, done: Work) -> float:
        return sum(price * n for price, n in zip(self, done.features, strict=True))

    def of_prompt(self, begin: int, count: int) -> float:
        """What *count* more tokens of a prompt add to a step, of which *begin* are computed."""
        return count * (self.prompt + self.cell * (begin + count / 2))

    def tokens_for(self, seconds: float, begin: int, most: int) -> int:
        """The most tokens, up to *most*, of a prompt of which *begin* are computed, that add no more than this to a step."""
        if self.of_prompt(begin, most) <= seconds:
            return most
        a, b = self.cell / 2, self.prompt + self.cell * begin
        # Of the two forms of the solution the one that has no difference of nearly equal numbers, and needs no a.
        return min(int(2 * seconds / (b + math.sqrt(b * b + 4 * a * seconds))), most) if seconds > 0 else 0


class Pace(NamedTuple):
    """How long a step with both may take that those who decode wait for, and how many tokens of prompts it may have at most."""

    target_s: float = math.inf
    prices: Prices = Prices()
    most_tokens: int = FIRST_TOKENS

    def seconds_for_prompts(self, decoding: Work) -> float:
        left = self.target_s - self.prices.of(decoding) - self.prices.prompts
        return max(left, LEAST_PART * self.target_s)


UNBOUNDED = Pace(most_tokens=1 << 30)
