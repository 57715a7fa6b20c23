"""LFM2 (Liquid AI 2025): most layers are gated short convolutions, a few have attention with grouped queries.

Unlike Llama: a layer without key/value heads is a convolution over its last inputs; queries and keys are normalised per
head before the rotation, which pairs the halves of a head; the last norm is stored as ``token_embd_norm``. LFM2-MoE has
experts after its first layers; the router adds a bias to choose them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from puna.errors import FileFormatError
from puna.gguf.reader import GGUFFile
from puna.kvcache.causal import ALL
from puna.kvcache.span import Span
from puna.ml.tensor import Tensor
from puna.model.decoder import Step
from puna.model.hybrid import HybridDecoder, HybridOptions, HybridWeights, state_sizes
from puna.model.prenorm import NormalisedAttention
from puna.model.routing import feed_forward, routing_of
from puna.nn.declare import gguf
from puna.nn.experts import Experts
from puna.nn.layers import RMSNorm
from puna.nn.mlp import SwiGLU
from puna.nn.short_conv import ShortConv


@dataclass(frozen=True)
class Options(HybridOptions):
    conv: int = 0  # tokens that a convolution sees
    window: int = 0  # 0: attention sees everything

    @classmethod
    def read(cls, file: GGUFFile) -> Self:
        (conv,) = state_sizes(file, "shortconv.l_cache")
        # As llama.cpp has it: the models with experts know no window.
        window = file.metadata.integer("attention.sliding_window", 0) if file.architecture == "lfm2" else 0
        if conv < 2 or not 0 <= window < 1 << 31:
            raise FileFormatError(f"{file.path}: shortconv.l_cache {conv} or attention.sliding_window {window} is not usable")
        return replace(
            super().read(file), conv=conv, window=window, routing=routing_of(file, is_normalised=True, gating_is_stated=True)
        )

    def span(self, layer: int) -> Span:
        return Span(window=self.window) if self.window else ALL

    def dims(self, layer: int) -> dict[str, int]:
        return {**super().dims(layer), "conv": self.conv}


@dataclass
class Layer:
    mixer: NormalisedAttention | ShortConv
    mlp: SwiGLU | Experts
    mixer_norm: RMSNorm = gguf("attn_norm", dims="embd")
    mlp_norm: RMSNorm = gguf("ffn_norm", dims="embd")

    def __call__(self, x: Tensor, step: Step, o: Options) -> Tensor:
        hidden = self.mixer_norm(x, o.eps)
        mixed = self.mixer(hidden, step.ctx, step.cache) if isinstance(self.mixer, ShortConv) else self.mixer(hidden, step, o)
        mixed, x = step.outputs_only(mixed, x)
        x = mixed + x
        hidden = self.mlp_norm(x, o.eps)
        return feed_forward(step.ctx, hidden, self.mlp, o.routing) + x


@dataclass
class Weights(HybridWeights):
    layers: list[Layer] = gguf("blk")
    output_norm: RMSNorm = gguf("token_embd_norm", alt="output_norm", dims="embd")


class Lfm2(HybridDecoder[Options]):
    Options = Options
    Weights = Weights

    def states(self, layer: int) -> Mapping[str, int]:
        o = self.options
        is_conv = isinstance(self.weights.layers[layer].mixer, ShortConv)
        return {"conv": (o.conv - 1) * o.n_embd} if is_conv else {}
