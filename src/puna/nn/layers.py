"""The small parts that models are made of, each with its weights declared beside its arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from puna.gguf.types import TensorType
from puna.ml.backend import Use
from puna.ml.tensor import Gate, Tensor
from puna.nn.adapter import Adapters, adapted
from puna.nn.declare import encoding, gguf


@dataclass
class Linear:
    """A matrix, with a factor for all of it where its encoding needs one (NVFP4), and a bias."""

    weight: Tensor = gguf("weight", use=Use.MATRIX)
    scale: Tensor | None = gguf("scale", dims="1", use=Use.VECTOR, optional=True)
    bias: Tensor | None = gguf("bias", use=Use.VECTOR, optional=True, skip=1)
    adapters: Adapters = adapted("weight", Use.MATRIX)

    is_precise: ClassVar[bool] = False

    def __call__(self, x: Tensor) -> Tensor:
        """X [n_in, n] to [n_out, n]."""
        return self.finish(self.product(x), x)

    def product(self, x: Tensor) -> Tensor:
        return x.products([self.weight], is_precise=self.is_precise)[0]

    def finish(self, y: Tensor, x: Tensor) -> Tensor:
        """What follows the product y [n_out, n] of the matrix with x."""
        y = self.adapters.linear(self.scaled(y), x)
        return y if self.bias is None else y + self.bias

    @property
    def is_plain(self) -> bool:
        """Whether nothing follows the product."""
        return self.scale is None and self.bias is None and not self.adapters

    def scaled(self, y: Tensor) -> Tensor:
        return y if self.scale is None else y * self.scale


class PreciseLinear(Linear):
    """For models whose values are too large for sums in F16."""

    is_precise: ClassVar[bool] = True


@dataclass
class FeedForwardLinear(Linear):
    """Of a dense feed-forward part, where a factor comes last, as llama.cpp has it: on adapters and bias too.

    Of NVFP4 the factor is a part of the matrix and stands before both. llama.cpp ends the process in that case.
    """

    type: TensorType = encoding("weight")

    def finish(self, y: Tensor, x: Tensor) -> Tensor:
        if self.scale is None or self.type is TensorType.NVFP4:
            return super().finish(y, x)
        y = self.adapters.linear(y, x)
        return self.scaled(y if self.bias is None else y + self.bias)


class PreciseFeedForwardLinear(FeedForwardLinear, PreciseLinear):
    pass


def linears(x: Tensor, *parts: Linear) -> tuple[Tensor, ...]:
    """X [n_in, n] through each of them, [n_out, n]: what multiplies the same is asked for together."""
    is_precise = any(part.is_precise for part in parts)
    products = x.products([part.weight for part in parts], is_precise=is_precise)
    return tuple(part.finish(y, x) for part, y in zip(parts, products, strict=True))


def gated(x: Tensor, gate: Gate, *parts: Linear) -> Tensor:
    """X [n_in, n] through gate and up, or through one matrix with the rows of both, to [n_out, n]."""
    if all(part.is_plain for part in parts):
        return x.gated_product([part.weight for part in parts], gate)
    found = linears(x, *parts)
    return gate.of_halves(*found) if len(found) == 1 else gate.of(*found)


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
        return x.rms_norm(eps, self.weight)


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
