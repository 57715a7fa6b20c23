"""Llama (Touvron et al. 2023) and the many models of its shape: Llama 2 and 3, Mistral 7B, SmolLM, TinyLlama, Yi, …

Pre-norm with RMSNorm, rotary positions on neighbouring pairs, grouped-query attention, SwiGLU. Biases, frequency
factors (Llama 3.1), multipliers and an own output matrix are used where the file has them; Mixtral's layers have experts
instead of one MLP.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from puna.gguf.reader import GGUFFile
from puna.model.prenorm import Multipliers, PreNormDecoder, PreNormLayer, PreNormOptions, PreNormWeights
from puna.model.routing import routing_of
from puna.nn.declare import gguf
from puna.nn.experts import Experts
from puna.nn.mlp import SwiGLU


@dataclass(frozen=True)
class Options(PreNormOptions):
    is_neox: ClassVar[bool] = False

    @classmethod
    def read(cls, file: GGUFFile) -> Self:
        routing = routing_of(file, is_normalised=True)
        return replace(super().read(file), routing=routing, multipliers=Multipliers.read(file))


@dataclass
class Layer(PreNormLayer):
    mlp: SwiGLU | Experts


@dataclass
class Weights(PreNormWeights):
    layers: list[Layer] = gguf("blk")


class Llama(PreNormDecoder[Options]):
    Options = Options
    Weights = Weights
