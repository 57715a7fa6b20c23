"""The small parts that models are made of, each with its weights declared beside its arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from puna.ml.backend import Use
from puna.ml.tensor import Tensor
from puna.nn.adapter import Adapters, adapted
from puna.nn.declare import gguf


@dataclass
class Linear:
    weight: Tensor = gguf("weight", use=Use.MATRIX)
    bias: Tensor | None = gguf("bias", use=Use.VECTOR, optional=True, skip=1)
    adapters: Adapters = adapted("weight", Use.MATRIX)

    def __call__(self, x: Tensor) -> Tensor:
        """X [n_in, n] to [n_out, n]."""
        y = self.adapters.linear(self.weight.mul_mat(x), x)
        return y if self.bias is None else y + self.bias


class PreciseLinear(Linear):
    """For models whose values are too large for sums in F16."""

    def __call__(self, x: Tensor) -> Tensor:
        """X [n_in, n] to [n_out, n]."""
        y = self.adapters.linear(self.weight.mul_mat(x).precise(), x)
        return y if self.bias is None else y + self.bias


@dataclass
class Embedding:
    weight: Tensor = gguf("weight", use=Use.ROWS)
    adapters: Adapters = adapted("weight", Use.ROWS)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Tokens I32 [n] to [n_embd, n]."""
        return self.adapters.rows(self.weight.rows(tokens), tokens)


@dataclass
class RMSNorm:
    weight: Tensor = gguf("weight", use=Use.VECTOR)

    def __call__(self, x: Tensor, eps: float) -> Tensor:
        return x.rms_norm(eps) * self.weight


@dataclass
class LayerNorm:
    weight: Tensor = gguf("weight", use=Use.VECTOR)
    bias: Tensor | None = gguf("bias", use=Use.VECTOR, optional=True)

    def __call__(self, x: Tensor, eps: float) -> Tensor:
        y = x.norm(eps) * self.weight
        return y if self.bias is None else y + self.bias


def softcap(x: Tensor, cap: float) -> Tensor:
    """Bend values into (-cap, cap), leaving small ones as they are (Gemma Team 2024)."""
    return x.scale(1 / cap).tanh().scale(cap)
