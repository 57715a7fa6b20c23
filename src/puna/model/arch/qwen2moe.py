"""Qwen 1.5 and 2 with experts (Qwen Team 2024): A2.7B, 57B-A14B.

Qwen 2's attention. Beside the routed experts, whose weights are the router's probabilities as they are, every token goes
through a shared one and decides for itself how much of it is added.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from puna.gguf.reader import GGUFFile
from puna.model.prenorm import PreNormDecoder, PreNormLayer, PreNormOptions, PreNormWeights
from puna.model.routing import needed_routing
from puna.nn.declare import gguf
from puna.nn.experts import Experts, GatedSharedExpert


@dataclass(frozen=True)
class Options(PreNormOptions):
    @classmethod
    def read(cls, file: GGUFFile) -> Self:
        return replace(super().read(file), routing=needed_routing(file, is_normalised=False))


@dataclass
class Layer(PreNormLayer):
    mlp: Experts
    shared: GatedSharedExpert


@dataclass
class Weights(PreNormWeights):
    layers: list[Layer] = gguf("blk")


class Qwen2MoE(PreNormDecoder[Options]):
    Options = Options
    Weights = Weights
