"""Granite 3 and 4 (IBM 2024), dense and with experts.

Llama's layer with multipliers on the embedding, on what each part of a layer adds, on the scores of attention and on the
logits. Some models of the fourth generation know no positions at all (NoPE); some of those with experts have a shared one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from puna.gguf.reader import GGUFFile
from puna.ml.tensor import RopeOptions
from puna.model.prenorm import Multipliers, PreNormDecoder, PreNormLayer, PreNormOptions, PreNormWeights
from puna.model.routing import routing_of
from puna.nn.declare import gguf
from puna.nn.experts import Experts
from puna.nn.mlp import SwiGLU


@dataclass(frozen=True)
class Options(PreNormOptions):
    knows_positions: bool = True

    is_neox: ClassVar[bool] = False

    @classmethod
    def read(cls, file: GGUFFile) -> Self:
        return replace(
            super().read(file),
            routing=routing_of(file, is_normalised=True),
            multipliers=Multipliers.read(file),
            # The key says something else in other families; here it switches the rotation, where there are no experts.
            knows_positions=file.architecture != "granite" or file.metadata.boolean("rope.scaling.finetuned", True),
        )

    def rope_of(self, layer: int) -> RopeOptions | None:
        return self.rope if self.knows_positions else None


@dataclass
class Layer(PreNormLayer):
    mlp: SwiGLU | Experts


@dataclass
class Weights(PreNormWeights):
    layers: list[Layer] = gguf("blk")


class Granite(PreNormDecoder[Options]):
    Options = Options
    Weights = Weights
