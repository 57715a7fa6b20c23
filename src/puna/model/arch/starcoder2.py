"""StarCoder 2 (Lozhkov et al. 2024), models of code.

Llama's layer with LayerNorm for RMSNorm, a plain MLP with GELU, biases everywhere, and rotary positions on halves of a
head. Its window of 4096 is left out, as in llama.cpp: files do not state it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from puna.model.decoder import LAYER_NORM_EPS
from puna.model.prenorm import PreNormDecoder, PreNormLayer, PreNormOptions, PreNormWeights
from puna.nn.declare import gguf
from puna.nn.layers import LayerNorm
from puna.nn.mlp import GELU


@dataclass(frozen=True)
class Options(PreNormOptions):
    eps_key: ClassVar[str] = LAYER_NORM_EPS


@dataclass
class Layer(PreNormLayer):
    mlp: GELU
    attention_norm: LayerNorm = gguf("attn_norm", dims="embd")
    mlp_norm: LayerNorm = gguf("ffn_norm", dims="embd")


@dataclass
class Weights(PreNormWeights):
    layers: list[Layer] = gguf("blk")
    output_norm: LayerNorm = gguf("output_norm", dims="embd")


class StarCoder2(PreNormDecoder[Options]):
    Options = Options
    Weights = Weights
