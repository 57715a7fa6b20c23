"""How likely a token was: logarithms of probabilities from a row of logits as the model gave it.

Knows nothing of temperature, filters or text. A NaN counts as -inf, as everywhere in sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from puna.sample import transforms
from puna.sample.transforms import Floats

# The logarithm of a probability that a double cannot tell from 0: JSON has no infinity.
LOWEST = -9999.0


class TokenProbability(NamedTuple):
    token: int
    logprob: float


def logprobs(row: Floats, tokens: Sequence[int]) -> list[float]:
    """The logarithm of the softmax of the row at these tokens.

    The maximum is subtracted first, so nothing overflows; exponentials are taken in float32, their sum in float64.
    """
    row = np.minimum(transforms.without_nan(row), np.finfo(np.float32).max)
    greatest = row.max()
    if greatest == -np.inf:
        return [LOWEST] * len(tokens)
    total = float(np.log(np.exp(row - greatest).sum(dtype=np.float64)))
    return [max(float(row[token]) - float(greatest) - total, LOWEST) for token in tokens]


def top_logprobs(row: Floats, token: int, n_top: int) -> tuple[float, list[TokenProbability]]:
    """The token's own, and the n_top likeliest in its place, likeliest first; it may be missing among them."""
    top = [int(t) for t in transforms.top_k(row, n_top)] if n_top else []
    own, *others = logprobs(row, [token, *top])
    return own, [TokenProbability(t, p) for t, p in zip(top, others, strict=True)]
