"""The feed-forward part of a layer, gated (Shazeer 2020) or plain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from puna.ml.tensor import Gate, Tensor
from puna.nn.declare import gguf
from puna.nn.layers import FeedForwardLinear, gated


@dataclass
class GatedMLP:
    joins: ClassVar = ("gate", "up")

    gate: FeedForwardLinear = gguf("ffn_gate", dims="embd ff")
    up: FeedForwardLinear = gguf("ffn_up", dims="embd ff")
    down: FeedForwardLinear = gguf("ffn_down", dims="ff embd")


class SwiGLU(GatedMLP):
    def __call__(self, x: Tensor) -> Tensor:
        """X [n_embd, n] to [n_embd, n]."""
        return self.down(gated(x, Gate.SILU, self.gate, self.up))


class GeGLU(GatedMLP):
    def __call__(self, x: Tensor) -> Tensor:
        """X [n_embd, n] to [n_embd, n]."""
        return self.down(gated(x, Gate.GELU, self.gate, self.up))


@dataclass
class PackedSwiGLU:
    """Gate and up in one matrix, the gate's rows first."""

    gate_up: FeedForwardLinear = gguf("ffn_up", dims="embd 2*ff")
    down: FeedForwardLinear = gguf("ffn_down", dims="ff embd")

    def __call__(self, x: Tensor) -> Tensor:
        """X [n_embd, n] to [n_embd, n]."""
        return self.down(gated(x, Gate.SILU, self.gate_up))


@dataclass
class GELU:
    """Without a gate (Hendrycks & Gimpel 2016)."""

    up: FeedForwardLinear = gguf("ffn_up", dims="embd ff")
    down: FeedForwardLinear = gguf("ffn_down", dims="ff embd")

    def __call__(self, x: Tensor) -> Tensor:
        """X [n_embd, n] to [n_embd, n]."""
        return self.down(self.up(x).gelu())


@dataclass
class ReLUSquared:
    """Without a gate, relu² between (So et al. 2021)."""

    up: FeedForwardLinear = gguf("ffn_up", dims="embd ff")
    down: FeedForwardLinear = gguf("ffn_down", dims="ff embd")

    def __call__(self, x: Tensor) -> Tensor:
        """X [n_embd, n] to [n_embd, n]."""
        return self.down(self.up(x).relu().square())
