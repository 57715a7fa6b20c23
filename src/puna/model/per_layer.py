"""Per-layer embeddings (Gemma 3n and 4, Gemma Team 2025): each token brings every layer a short vector of its own."""

from __future__ import annotations

from dataclasses import dataclass

from puna.ml.tensor import Tensor
from puna.nn.declare import gguf
from puna.nn.layers import Embedding, Linear, RMSNorm


@dataclass
class PerLayerInputs:
    """Half looked up, half made of the token's embedding."""

    table: Embedding = gguf("per_layer_token_embd", dims="given_all vocab")
    projection: Linear = gguf("per_layer_model_proj", dims="embd given_all")
    norm: RMSNorm = gguf("per_layer_proj_norm", dims="given")

    def __call__(self, tokens: Tensor, x: Tensor, eps: float) -> Tensor:
        """Tokens I32 [n] and their embeddings [n_embd, n] to [n_given, n, n_layers]."""
        n_given, (n_embd, n) = self.norm.weight.shape[0], x.shape[:2]
        looked_up = self.table(tokens)
        shape = n_given, looked_up.shape[0] // n_given, n
        looked_up = looked_up.reshape(*shape).scale(n_given**0.5)
        made = self.norm(self.projection(x).scale(n_embd**-0.5).reshape(*shape), eps)
        return (made + looked_up).scale(2**-0.5).permute(0, 2, 1, 3).contiguous()


@dataclass
class PerLayerGate:
    """What a layer makes of its vector."""

    gate: Linear = gguf("inp_gate", dims="embd given")
    projection: Linear = gguf("proj", dims="given embd")
    norm: RMSNorm = gguf("post_norm", dims="embd")

    def __call__(self, x: Tensor, given: Tensor, eps: float) -> Tensor:
        """X [n_embd, n] and the layer's vectors [n_given, n] to [n_embd, n]."""
        return self.norm(self.projection(self.gate(x).gelu() * given), eps)


def part(x: Tensor, index: int) -> Tensor:
    """[a, n, index] of x [a, n, m], contiguous as x is."""
    return x.view(x.shape[:2], (x.strides[1],), index * x.strides[2])
