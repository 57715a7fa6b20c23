"""The vision transformer that most encoders are (Dosovitskiy et al. 2021): patches of an image, each of which sees all others.

Parts with their weights, under the names that both kinds of file have for them. A family puts them together, and has what
comes before and after.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from puna.gguf.reader import GGUFFile
from puna.ml.backend import Use
from puna.ml.tensor import Gate, Tensor
from puna.nn.declare import gguf
from puna.nn.layers import LayerNorm, Linear, RMSNorm, gated
from puna.nn.projections import QKV
from puna.vision.look import Look
from puna.vision.metadata import Activation, VisionOptions

MAX_NODES_OF_LAYER = 64  # an upper bound, of any layer that is made of these parts

Turn = Callable[[Tensor], Tensor]  # of queries and keys [head_dim, n_heads, n], by the patches' places


@dataclass
class PatchEmbedding:
    """A convolution whose stride is its width: a product with patches that are cut already."""

    weight: Tensor = gguf("weight", dims="patch patch 3 embd", use=Use.MATRIX)
    bias: Tensor | None = gguf("bias", dims="embd", use=Use.VECTOR, optional=True)

    def __call__(self, patches: Tensor) -> Tensor:
        """Patches [3 * patch * patch, n] to [n_embd, n]."""
        width, _, n_channels, n_embd = self.weight.shape
        matrix = self.weight.beside(patches).reshape(width * width * n_channels, n_embd)
        y = matrix.mul_mat(patches)
        return y if self.bias is None else y + self.bias


@dataclass
class Positions:
    """A learned vector for each place."""

    weight: Tensor = gguf("weight", dims="embd positions", use=Use.ROWS)

    def __call__(self, places: Tensor) -> Tensor:
        """Places I32 [n] to [n_embd, n]."""
        return self.weight.rows(places)


@dataclass
class Attention:
    qkv: QKV
    output: Linear = gguf("attn_out", alt="attn_output", dims="mixed embd")

    def __call__(self, look: Look, x: Tensor, o: VisionOptions, turn: Turn | None = None) -> Tensor:
        query, key, value = self.qkv(x, o.n_heads, o.n_heads, o.head_dim)
        query, key = self.normalised(query, key, o.eps)
        if turn:
            query, key = turn(query), turn(key)
        return self.output(look(query, key, value))

    def normalised(self, query: Tensor, key: Tensor, _eps: float) -> tuple[Tensor, Tensor]:
        """Before they are turned; most leave both as they are."""
        return query, key


@dataclass
class FeedForward:
    up: Linear = gguf("ffn_up", alt="mlp.fc1", dims="embd ff")
    down: Linear = gguf("ffn_down", alt="mlp.fc2", dims="ff embd")

    def __call__(self, x: Tensor, activation: Activation) -> Tensor:
        """X [n_embd, n] to [n_embd, n]."""
        return self.down(activation(self.up(x)))


@dataclass
class SwappedFeedForward(FeedForward):
    """As the first of llama.cpp's converters named the two, of which many files are left."""

    up: Linear = gguf("ffn_down", dims="embd ff")
    down: Linear = gguf("ffn_up", dims="ff embd")


def is_swapped(file: GGUFFile, o: VisionOptions) -> bool:
    """Whether it is SwappedFeedForward that the file's layers have."""
    down = file.tensors.get("v.blk.0.ffn_down.weight")
    return down is not None and down.shape[0] == o.n_embd and o.n_embd != o.n_ff


@dataclass
class Layer:
    """Norms stand before what they norm; learned scales, where there are any, before what is added."""

    attention: Attention
    mlp: FeedForward
    norm1: LayerNorm = gguf("ln1", alt="layer_norm1", dims="embd")
    norm2: LayerNorm = gguf("ln2", alt="layer_norm2", dims="embd")
    scale1: Tensor | None = gguf("ls1.weight", dims="embd", use=Use.VECTOR, optional=True)
    scale2: Tensor | None = gguf("ls2.weight", dims="embd", use=Use.VECTOR, optional=True)

    def __call__(self, look: Look, x: Tensor, o: VisionOptions, activation: Activation) -> Tensor:
        """X [n_embd, n] to [n_embd, n]."""
        mixed = self.attention(look, self.norm1(x, o.eps), o)
        x = x + (mixed if self.scale1 is None else mixed * self.scale1)
        bent = self.mlp(self.norm2(x, o.eps), activation)
        return x + (bent if self.scale2 is None else bent * self.scale2)


@dataclass
class SwappedLayer(Layer):
    mlp: SwappedFeedForward


@dataclass
class Layers:
    layers: list[Layer] = gguf("v.blk")


@dataclass
class SwappedLayers(Layers):
    layers: list[SwappedLayer] = gguf("v.blk")  # type: ignore[assignment]  # a list of what a Layer is


def layers_of(file: GGUFFile, o: VisionOptions) -> type[Layers]:
    return SwappedLayers if is_swapped(file, o) else Layers


@dataclass
class GatedFeedForward:
    gate: Linear = gguf("ffn_gate", dims="embd ff")
    up: Linear = gguf("ffn_up", dims="embd ff")
    down: Linear = gguf("ffn_down", dims="ff embd")

    def __call__(self, x: Tensor, gate: Gate) -> Tensor:
        """X [n_embd, n] to [n_embd, n]."""
        return self.down(gated(x, gate, self.gate, self.up))


@dataclass
class GatedLayer:
    """As language models have them."""

    attention: Attention
    mlp: GatedFeedForward
    norm1: RMSNorm = gguf("ln1", alt="attn_norm", dims="embd")
    norm2: RMSNorm = gguf("ln2", alt="ffn_norm", dims="embd")

    def __call__(self, look: Look, x: Tensor, o: VisionOptions, gate: Gate, turn: Turn) -> Tensor:
        """X [n_embd, n] to [n_embd, n]."""
        x = x + self.attention(look, self.norm1(x, o.eps), o, turn)
        return x + self.mlp(self.norm2(x, o.eps), gate)
