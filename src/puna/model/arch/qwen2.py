"""Qwen 2 and 2.5 (Qwen Team 2024), text.

Llama's layer with biases of queries, keys and values, and rotary positions on halves of a head. Small models share the
embedding with the head.
"""

from __future__ import annotations

from dataclasses import dataclass

from puna.model.prenorm import PreNormDecoder, PreNormLayer, PreNormOptions, PreNormWeights
from puna.nn.declare import gguf
from puna.nn.mlp import SwiGLU


@dataclass
class Layer(PreNormLayer):
    mlp: SwiGLU


@dataclass
class Weights(PreNormWeights):
    layers: list[Layer] = gguf("blk")


class Qwen2(PreNormDecoder[PreNormOptions]):
    Options = PreNormOptions
    Weights = Weights
