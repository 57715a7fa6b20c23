"""Low-rank adapters (LoRA, Hu et al. 2021) as parts of a model apply them: y = W x + scale * B (A x).

A part that owns a weight declares ``adapters: Adapters = adapted("weight", Use.MATRIX)`` and sends its product through
them. A part that multiplies with several weights at once lets each weight's adapters change that weight's rows of the
result: they expect the product with their own weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from puna.ml.backend import LowRank, Use
from puna.ml.tensor import Tensor


@dataclass(frozen=True)
class Adapters:
    """Those of one weight, in the order in which they were given. Without any, everything passes unchanged."""

    changes: Sequence[LowRank] = ()

    def __bool__(self) -> bool:
        return bool(self.changes)

    def linear(self, y: Tensor, x: Tensor) -> Tensor:
        """The product y [n_out, n] of the weight with x [n_in, n], changed."""
        for change in self.changes:
            y = y + change.up.mul_mat(change.down.mul_mat(x)).scale(change.scale)
        return y

    def experts(self, y: Tensor, x: Tensor, experts: Tensor) -> Tensor:
        """The product y [n_out, n_used, n] of a stack of weights with x [n_in, n_used or 1, n], changed."""
        for change in self.changes:
            y = y + change.up.mul_mat_id(change.down.mul_mat_id(x, experts), experts).scale(change.scale)
        return y

    def rows(self, y: Tensor, tokens: Tensor) -> Tensor:
        """The rows y [n_embd, n] that were looked up for tokens I32 [n], changed."""
        for change in self.changes:
            y = y + change.up.mul_mat(change.down.rows(tokens)).scale(change.scale)
        return y


NONE = Adapters()


def adapted(name: str, use: Use) -> Any:
    """A field for the adapters of the weight *name* in the same group."""
    return field(default=NONE, metadata={"adapts": name, "use": use})
