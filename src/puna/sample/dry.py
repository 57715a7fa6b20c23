"""DRY: what would go on repeating the text before it becomes the less likely the longer the repetition already is.

A token that came after an earlier occurrence of the text's last n tokens is made less likely by ``multiplier * base **
(n - allowed_length)``, from n = allowed_length on. Repetitions are not followed across a breaker, and a token that is one by
itself is never made less likely.
Knows tokens, not texts: which tokens break is ``Breakers``.

How long the common ending of the text and of each of its beginnings is, is kept up to date with one vector operation per
token: where the new token stands, the ending before it grows by one, everywhere else it is gone.

Source: the sampler of that name in llama.cpp, designed by p-e-w.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from puna.sample.transforms import Doubles, Ids

Breakers = Mapping[int, Sequence[tuple[int, ...]]]  # by their last token: sequences after which a repetition begins anew

_LOG_OF_GREATEST = 88.7228391  # of a float32: powers stay below it


class Repetition:
    """One request's text as DRY sees it. *window*: so many of the last tokens are looked at."""

    def __init__(self, multiplier: float, base: float, allowed_length: int, window: int, breakers: Breakers) -> None:
        self._multiplier = multiplier
        self._base = base
        self._allowed = max(allowed_length, 0)
        self._window = window
        self._breakers = breakers
        self._n = 0
        self._tokens = np.zeros(256, np.int64)
        self._endings: NDArray[np.int64] = np.zeros(256, np.int64)  # [j]: of tokens[: j + 1] and all tokens; valid below n - 1
        self._head = -1  # where the breaker nearest to the end begins; -1: there is none
        self._head_length = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Take tokens; many at once cost less than one after the other only at the beginning."""
        tokens = tokens[-self._window :]
        if self._n or len(tokens) < 2:
            for token in tokens:
                self.append(token)
            return
        while len(self._tokens) < len(tokens):
            self._grow()
        for token in tokens:
            self._tokens[self._n] = token
            self._n += 1
            self._look_for_breaker(token)
        self._endings[: self._n - 1] = common_endings(tokens)

    def append(self, token: int) -> None:
        if self._n == len(self._tokens):
            self._grow()
        n = self._n
        ends = self._endings
        grown = np.zeros(n, np.int64)
        if n:
            grown[0] = 1
            np.add(ends[: n - 1], 1, out=grown[1:])
            grown[self._tokens[:n] != token] = 0
        ends[:n] = grown
        self._tokens[n] = token
        self._n = n + 1
        self._look_for_breaker(token)

    def _grow(self) -> None:
        """Make room: tokens that have left the window go, if they are many."""
        if self._n > 2 * self._window:
            gone = self._n - self._window
            self._tokens[: self._window] = self._tokens[gone : self._n]
            self._endings[: self._window] = self._endings[gone : self._n]
            self._n, self._head = self._window, self._head - gone if self._head >= gone else -1
        else:
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
            self._endings = np.concatenate([self._endings, np.zeros_like(self._endings)])

    def _look_for_breaker(self, last: int) -> None:
        for sequence in self._breakers.get(last, ()):
            head = self._n - len(sequence)
            if head < self._head or head < 0 or self._tokens[head : self._n].tolist() != list(sequence):
                continue
            if head > self._head or len(sequence) > self._head_length:
                self._head, self._head_length = head, len(sequence)

    @property
    def penalties(self) -> tuple[Ids, Doubles]:
        """Distinct tokens, and what is to be subtracted from their logits."""
        nothing = np.zeros(0, np.int64), np.zeros(0)
        n, width = self._n, min(self._n, self._window)
        limit = width if self._head < n - width else n - self._head - self._head_length
        if width <= self._allowed or limit < self._allowed:
            return nothing
        begin = n - width
        # No repetition is longer than what of it the window holds, nor than the text since the last breaker.
        lengths = np.minimum(self._endings[begin : n - 1], np.minimum(np.arange(1, width), limit))
        found = np.flatnonzero(lengths >= self._allowed)
        if not len(found):
            return nothing
        tokens, which = np.unique(self._tokens[begin + 1 + found], return_inverse=True)
        longest = np.zeros(len(tokens), np.int64)
        np.maximum.at(longest, which, lengths[found])
        goes_on = [(token,) not in self._breakers.get(token, ()) for token in tokens.tolist()]
        tokens, exponents = tokens[goes_on], longest[goes_on] - self._allowed
        if self._base > 1.000001:
            exponents = np.minimum(exponents, int(_LOG_OF_GREATEST / math.log(self._base)))
        return tokens, self._multiplier * np.power(self._base, exponents.astype(np.float64))


def common_endings(tokens: Sequence[int]) -> list[int]:
    """How many tokens each proper beginning has at its end in common with the whole, in linear time.

    It is the Z function of the tokens in reverse: within a stretch that is known to repeat, what was found at its first
    occurrence holds again, and only beyond its end tokens are compared.
    """
    text = list(reversed(tokens))
    n = len(text)
    z = [0] * n
    begin = end = 0  # the stretch that reaches furthest
    for i in range(1, n):
        length = min(z[i - begin], end - i) if i < end else 0
        while i + length < n and text[length] == text[i + length]:
            length += 1
        z[i] = length
        if i + length > end:
            begin, end = i, i + length
    return z[:0:-1]
