"""Qwen 3 with experts (Qwen Team 2025): 30B-A3B, 235B-A22B.

Qwen 3's attention; every layer has many narrow experts and no shared one. The weights of those chosen sum to one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from puna.gguf.reader import GGUFFile
from puna.model.prenorm import NormalisedAttention, PreNormDecoder, PreNormLayer, PreNormOptions, PreNormWeights
from puna.model.routing import needed_routing
from puna.nn.declare import gguf
from puna.nn.experts import Experts


@dataclass(frozen=True)
class Options(PreNormOptions):
    @classmethod
    def read(cls, file: GGUFFile) -> Self:
        return replace(super().read(file), routing=needed_routing(file, is_normalised=True))


@dataclass
class Layer(PreNormLayer):
    attention: NormalisedAttention
    mlp: Experts


@dataclass
class Weights(PreNormWeights):
    layers: list[Layer] = gguf("blk")


class Qwen3MoE(PreNormDecoder[Options]):
    Options = Options
    Weights = Weights
