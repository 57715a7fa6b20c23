"""The attention span, which is how far back a row sees: everything, a sliding window, or its own chunk.

Arithmetic on positions only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

P = TypeVar("P", int, npt.NDArray[np.int32])


@dataclass(frozen=True)
class Span:
    """A window of W shows a row W keys, its own included, as in llama.cpp and transformers.

    A chunk of C cuts the positions at the multiples of C; a row sees those of its chunk that are not later than itself.
    """

    window: int = 0  # 0: no window
    chunk: int = 0  # 0: no chunks

    def __post_init__(self) -> None:
        if min(self.window, self.chunk) < 0 or (self.window and self.chunk):
            raise ValueError(f"{self} is no way to look back")

    @property
    def is_bounded(self) -> bool:
        return bool(self.window or self.chunk)

    @property
    def n_kept(self) -> int:
        """History that a sequence is sure to keep, besides the rows of its last batch."""
        return max(self.window, self.chunk)

    def first(self, position: P) -> P:
        """The first position that the row at this one sees; below 0 when it sees all."""
        if self.window:
            return position - (self.window - 1)
        if self.chunk:
            return position - position % self.chunk
        return position * 0

    def kept_from(self, position: int) -> int:
        """What lies before may go once a row at this position is computed; it could still be computed again, but one."""
        return max(0, self.first(max(position - 1, 0)))

    def needed_from(self, position: int) -> int:
        """What must be held from here on for a row at this position to be computed; the token before it at least."""
        return max(min(self.first(position), position - 1), 0)
