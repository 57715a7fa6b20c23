"""The gated short convolution of LFM2 (Liquid AI 2025): a layer's memory is its last two or three inputs."""

from __future__ import annotations

from dataclasses import dataclass

from puna.kvcache.cache import Cache
from puna.kvcache.recurrent import StateGroup
from puna.ml.backend import Context
from puna.ml.tensor import Tensor
from puna.nn.declare import gguf
from puna.nn.layers import Linear
from puna.nn.recurrent import CausalConv, over_groups


@dataclass
class ShortConv:
    """``out(c * conv(b * x))``, where b, c and x are three projections of the input, in this order in one matrix.

    State ``conv``: (width - 1) * n_embd values.
    """

    conv: CausalConv = gguf("shortconv.conv", dims="conv embd")
    input: Linear = gguf("shortconv.in_proj", dims="embd 3*embd")
    output: Linear = gguf("shortconv.out_proj", dims="embd embd")

    def __call__(self, x: Tensor, ctx: Context, cache: Cache) -> Tensor:
        """X [n_embd, n] to [n_embd, n]."""
        n_embd = x.shape[0]
        projected = self.input(x)

        def convolved(group: StateGroup) -> Tensor:
            b, c, value = (group.rows(projected, i * n_embd, n_embd) for i in range(3))
            return (c * self.conv(b * value, group)).reshape(n_embd, group.n_rows * group.n_sequences)

        return self.output(over_groups(ctx, cache, convolved))
