"""GLM-4.5, 4.6 and 4.5 Air (GLM-4.5 Team 2025), and the language model of GLM-4.5V.

Beside Llama: experts behind some dense layers, chosen by sigmoids and a bias that takes part in the choice alone, with
one expert that all tokens share; biases on queries, keys and values; half of each head rotates. The large ones normalise
queries and keys. Layers at the end that guess further tokens are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from puna.gguf.reader import GGUFFile
from puna.ml.tensor import Tensor
from puna.model import prenorm
from puna.model.decoder import DecoderOptions
from puna.model.prenorm import PreNormDecoder, PreNormLayer, PreNormOptions, PreNormWeights
from puna.model.routing import needed_routing
from puna.nn import mlp
from puna.nn.declare import gguf
from puna.nn.experts import Experts, Gating
from puna.nn.layers import PreciseFeedForwardLinear, PreciseLinear, RMSNorm


@dataclass(frozen=True)
class Options(PreNormOptions):
    @classmethod
    def read(cls, file: GGUFFile) -> Self:
        return replace(super().read(file), routing=needed_routing(file, gating=Gating.SIGMOID, gating_is_stated=True))


@dataclass
class Attention(prenorm.Attention):
    output: PreciseLinear = gguf("attn_output", dims="mixed embd")
    query_norm: RMSNorm | None = gguf("attn_q_norm", dims="head", optional=True)
    key_norm: RMSNorm | None = gguf("attn_k_norm", dims="head", optional=True)

    def normalised(self, query: Tensor, key: Tensor, o: DecoderOptions) -> tuple[Tensor, Tensor]:
        return (
            self.query_norm(query, o.eps) if self.query_norm else query,
            self.key_norm(key, o.eps) if self.key_norm else key,
        )


@dataclass
class SwiGLU(mlp.SwiGLU):
    down: PreciseFeedForwardLinear = gguf("ffn_down", dims="ff embd")


@dataclass
class Layer(PreNormLayer):
    attention: Attention
    mlp: SwiGLU | Experts
    mlp_norm: RMSNorm = gguf("post_attention_norm", dims="embd")


@dataclass
class Weights(PreNormWeights):
    layers: list[Layer] = gguf("blk")


class Glm4MoE(PreNormDecoder[Options]):
    Options = Options
    Weights = Weights
