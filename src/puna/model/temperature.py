"""Attention temperature: queries grow with their position, so that attention over very long contexts stays sharp.

Source: Llama 4 (Meta 2025) after Nakanishi 2025; also in Ministral 3. One step up for each *length* positions.
"""

from __future__ import annotations

from dataclasses import dataclass

from puna.ml.tensor import DType, Tensor


@dataclass(frozen=True)
class Temperature:
    """Queries at position p are multiplied by 1 + scale * ln(1 + floor((p + offset) / length))."""

    scale: float
    length: int
    offset: int = 0

    def __call__(self, positions: Tensor) -> Tensor:
        """Positions I32 [n] to factors F32 [1, 1, n]."""
        # Half a position more keeps the quotient away from whole numbers, where rounding would decide.
        steps = positions.cast(DType.F32).scale(1 / self.length, (self.offset + 0.5) / self.length).floor()
        return steps.scale(1.0, 1.0).log().scale(self.scale, 1.0).reshape(1, 1, positions.shape[0])
