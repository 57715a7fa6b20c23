"""The small parts that models are made of, each with its weights declared beside its arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from puna.gguf.types import TensorType
from puna.ml.backend import Use
from puna.ml.tensor import Tensor
from puna.nn.adapter import Adapters, adapted
from puna.nn.declare import encoding, gguf


@dataclass
class Linear:
    """A matrix, with a factor for all of it where its encoding needs one (NVFP4), and a bias."""

    weight: Tensor = gguf("weight", use=Use.MATRIX)
    scale: Tensor | None = gguf("scale", dims="1", use=Use.VECTOR, optional=True)
    bias: Tensor | None = gguf("bias", use=Use.VECTOR, optional=True, skip=1)
    adapters: Adapters = adapted("weight", Use.MATRIX)

    def __call__(self, x: Tensor) -> Tensor:
        """X [n_in, n] to [n_out, n]."""
        y = self.adapters.linear(self.scaled(self.product(x)), x)
        return y if self.bias is None else y + self.bias

    def product(self, x: Tensor) -> Tensor:
        return self.weight.mul_mat(x)

    def scaled(self, y: Tensor) -> Tensor:
        return y if self.scale is None else y * self.scale


class PreciseLinear(Linear):
    """For models whose values are too large for sums in F16."""

    def product(self, x: Tensor) -> Tensor:
        return super().product(x).precise()


@dataclass
class FeedForwardLinear(Linear):
    """Of a dense feed-forward part, where a factor comes last, as llama.cpp has it: on adapters and bias too.

    Of NVFP4 the factor is a part of the matrix and stands before both. llama.cpp ends the process in that case.
    """

    type: TensorType = encoding("weight")

    def __call__(self, x: Tensor) -> Tensor:
        """X [n_in, n] to [n_out, n]."""
        if self.scale is None or self.type is TensorType.NVFP4:
            return super().__call__(x)
        y = self.adapters.linear(self.product(x), x)
        return self.scaled(y if self.bias is None else y + self.bias)


class PreciseFeedForwardLinear(FeedForwardLinear, PreciseLinear):
    pass


@dataclass
class Embedding:
    weight: Tensor = gguf("weight", use=Use.ROWS)
    scale: Tensor | None = gguf("scale", dims="1", use=Use.VECTOR, optional=True)
    adapters: Adapters = adapted("weight", Use.ROWS)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Tokens I32 [n] to [n_embd, n]."""
        rows = self.weight.rows(tokens)
        return self.adapters.rows(rows if self.scale is None else rows * self.scale, tokens)


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
