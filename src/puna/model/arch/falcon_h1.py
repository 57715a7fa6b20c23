"""Falcon-H1 (TII 2025): in every layer attention and Mamba-2 work side by side on the same input, and their sum is added.

Like Llama otherwise. The family's multipliers are part of the weights in GGUF files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from puna.gguf.reader import GGUFFile
from puna.ml.backend import Use
from puna.ml.tensor import Tensor
from puna.model.decoder import Step
from puna.model.hybrid import HybridDecoder, HybridOptions
from puna.model.mamba import mamba_shape
from puna.model.prenorm import Attention, PreNormWeights
from puna.nn.declare import gguf
from puna.nn.layers import RMSNorm
from puna.nn.mamba2 import Mamba2, MambaShape
from puna.nn.mlp import SwiGLU


@dataclass(frozen=True)
class Options(HybridOptions):
    mamba: MambaShape = MambaShape(1, 1, 1, 1, 1)

    @classmethod
    def read(cls, file: GGUFFile) -> Self:
        return replace(super().read(file), mamba=mamba_shape(file))

    def dims(self, layer: int) -> dict[str, int]:
        return {**super().dims(layer), **self.mamba.dims}


@dataclass
class Layer:
    attention: Attention
    mamba: Mamba2
    mlp: SwiGLU
    mixer_norm: RMSNorm = gguf("attn_norm", dims="embd")
    mlp_norm: Tensor = gguf("ffn_norm", alt="ffn_norm.weight", dims="embd", use=Use.VECTOR)  # files leave out the suffix

    def __call__(self, x: Tensor, step: Step, o: Options) -> Tensor:
        hidden = self.mixer_norm(x, o.eps)
        attended = self.attention(hidden, step, o)
        recalled = self.mamba(hidden, step.ctx, step.cache, o.mamba, o.eps)
        mixed, x = step.outputs_only(attended + recalled, x)
        x = mixed + x
        return self.mlp(x.rms_norm(o.eps) * self.mlp_norm) + x


@dataclass
class Weights(PreNormWeights):
    layers: list[Layer] = gguf("blk")


class FalconH1(HybridDecoder[Options]):
    Options = Options
    Weights = Weights
    nodes_per_layer = 64
    nodes_per_group = 32

    def states(self, layer: int) -> Mapping[str, int]:
        return self.options.mamba.states
