"""Gemma (Gemma Team 2024), the first generation: 2B and 7B.

Llama's layer with GeGLU, rotary positions on halves of a head, and embeddings scaled by sqrt(n_embd). The embedding is
also the head. Norms multiply by one plus their weight; files have the sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

from puna.gguf.reader import GGUFFile
from puna.model.prenorm import Multipliers, PreNormDecoder, PreNormLayer, PreNormOptions, PreNormWeights
from puna.nn.declare import gguf
from puna.nn.mlp import GeGLU


@dataclass(frozen=True)
class Options(PreNormOptions):
    @classmethod
    def read(cls, file: GGUFFile) -> Self:
        o = super().read(file)
        return replace(o, multipliers=Multipliers(embedding=math.sqrt(o.n_embd)))


@dataclass
class Layer(PreNormLayer):
    mlp: GeGLU


@dataclass
class Weights(PreNormWeights):
    layers: list[Layer] = gguf("blk")


class Gemma(PreNormDecoder[Options]):
    Options = Options
    Weights = Weights
