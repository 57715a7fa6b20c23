"""What recurrent layers share: rows computed group by group, and the short convolution over a sequence's last tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

from puna.kvcache.cache import Cache
from puna.kvcache.recurrent import StateCache, StateGroup
from puna.ml.backend import Context, Use
from puna.ml.tensor import Tensor
from puna.nn.declare import gguf


def over_groups(ctx: Context, cache: Cache, compute: Callable[[StateGroup], Tensor]) -> Tensor:
    """Compute gives [width, n_rows * n_sequences] of a group and stores its states; the result is [width, n] of all rows."""
    assert isinstance(cache, StateCache), "a recurrent layer needs a cache with states"
    return reduce(lambda a, b: a.concat(b, 1), [compute(group) for group in cache.states(ctx)])


@dataclass
class CausalConv:
    """Each channel's weighted sum of its values at the last *width* tokens. State: those of the last width - 1."""

    kernel: Tensor = gguf("weight", use=Use.OPERAND)
    bias: Tensor | None = gguf("bias", use=Use.VECTOR, optional=True, skip=1)

    def __call__(self, x: Tensor, group: StateGroup) -> Tensor:
        """X [channels, n_rows, n_sequences], maybe a view, to the same shape; the state's name is ``conv``."""
        width, channels, _, _ = self.kernel.shape
        n, before = group.n_rows, width - 1
        seen = group.load("conv").reshape(before, channels, group.n_sequences).concat(x.permute(1, 0, 2, 3), 0)
        row = 4 * (before + n)
        last = seen.view((before, channels, group.n_sequences), (row, row * channels), 4 * n)
        group.store("conv", last.contiguous())
        y = seen.ssm_conv(self.kernel)
        return y if self.bias is None else y + self.bias
