"""The last n tokens of a sequence as distinct tokens with their counts, kept up to date one token at a time.

Knows nothing of penalties. A token costs the same whether the window holds 64 tokens or a whole context.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class RecentTokens:
    """A window over the last *length* tokens; below zero, over all."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._queue: deque[int] = deque()  # unused when the window is endless: nothing ever leaves it
        self._slots: dict[int, int] = {}  # token → where it stands in the arrays
        self._tokens = np.zeros(64, np.int64)
        self._counts = np.zeros(64, np.int64)

    def extend(self, tokens: Sequence[int]) -> None:
        if self.length >= 0:
            tokens = tokens[max(len(tokens) - self.length, 0) :]
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        if self.length == 0:
            return
        if self.length > 0:
            if len(self._queue) == self.length:
                self._remove(self._queue.popleft())
            self._queue.append(token)
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = len(self._slots)
            if slot == len(self._tokens):
                self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._tokens[slot] = token
            self._counts[slot] = 0
        self._counts[slot] += 1

    def _remove(self, token: int) -> None:
        slot = self._slots[token]
        self._counts[slot] -= 1
        if self._counts[slot]:
            return
        del self._slots[token]
        last = len(self._slots)
        if slot != last:  # the last one moves into the hole
            moved = int(self._tokens[last])
            self._tokens[slot], self._counts[slot] = moved, self._counts[last]
            self._slots[moved] = slot

    @property
    def distinct(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens and how often each occurs; views that the next change overwrites."""
        n = len(self._slots)
        return self._tokens[:n], self._counts[:n]
