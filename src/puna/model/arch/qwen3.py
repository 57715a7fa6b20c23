"""Qwen 3 (Qwen Team 2025), dense; also Qwen3-Embedding, which the pooling in a file tells apart.

Llama's layer with queries and keys normalised head by head, rotary positions on halves of a head, no biases, and heads
whose width the file states.
"""

from __future__ import annotations

from dataclasses import dataclass

from puna.model.prenorm import NormalisedAttention, PreNormDecoder, PreNormLayer, PreNormOptions, PreNormWeights
from puna.nn.declare import gguf
from puna.nn.mlp import SwiGLU


@dataclass
class Layer(PreNormLayer):
    attention: NormalisedAttention
    mlp: SwiGLU


@dataclass
class Weights(PreNormWeights):
    layers: list[Layer] = gguf("blk")


class Qwen3(PreNormDecoder[PreNormOptions]):
    Options = PreNormOptions
    Weights = Weights
