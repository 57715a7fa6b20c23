"""Phi-3 and Phi-4 (Abdin et al. 2024): mini, medium, 14B.

Llama's layer with queries, keys and values from one matrix, gate and up from another, and rotary positions on halves of
a head or on a part of it. Models for 128k tokens divide the frequencies by one set of factors up to the length that they
were first trained for and by another beyond it, and rotate with a magnitude (LongRoPE: Ding et al. 2024). The window that
some files state is not applied, as in llama.cpp: it was converted wrongly.
"""

from __future__ import annotations

from dataclasses import dataclass

from puna.model.prenorm import PreNormDecoder, PreNormLayer, PreNormOptions, PreNormWeights
from puna.nn.declare import gguf
from puna.nn.mlp import PackedSwiGLU


@dataclass
class Layer(PreNormLayer):
    mlp: PackedSwiGLU


@dataclass
class Weights(PreNormWeights):
    layers: list[Layer] = gguf("blk")


class Phi3(PreNormDecoder[PreNormOptions]):
    Options = PreNormOptions
    Weights = Weights
