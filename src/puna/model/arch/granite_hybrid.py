"""Granite 4.0 (IBM 2025), the hybrids: most layers are Mamba-2, a few attend; each is followed by an MLP or experts.

Granite's multipliers hold: of the embedding, of what each part of a layer adds, of scores and logits. Attention may know
no positions; experts may have a shared one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from puna.gguf.reader import GGUFFile
from puna.ml.tensor import RopeOptions, Tensor
from puna.model.decoder import Step
from puna.model.hybrid import HybridDecoder, HybridOptions
from puna.model.mamba import mamba_shape
from puna.model.prenorm import Attention, Multipliers, PreNormDecoder, PreNormOptions, PreNormWeights, scaled
from puna.model.routing import feed_forward, routing_of
from puna.nn.declare import gguf
from puna.nn.experts import Experts, SharedExpert
from puna.nn.layers import RMSNorm
from puna.nn.mamba2 import Mamba2, MambaShape
from puna.nn.mlp import SwiGLU


@dataclass(frozen=True)
class Options(HybridOptions, PreNormOptions):
    mamba: MambaShape = MambaShape(1, 1, 1, 1, 1)
    knows_positions: bool = True

    is_neox: ClassVar[bool] = False

    @classmethod
    def read(cls, file: GGUFFile) -> Self:
        return replace(
            super().read(file),
            mamba=mamba_shape(file),
            routing=routing_of(file, is_normalised=True),
            multipliers=Multipliers.read(file),
            # The key says something else in other families; here it switches the rotation.
            knows_positions=file.metadata.boolean("rope.scaling.finetuned", True),
        )

    def rope_of(self, layer: int) -> RopeOptions | None:
        return self.rope if self.knows_positions else None

    def dims(self, layer: int) -> dict[str, int]:
        return {**super().dims(layer), **self.mamba.dims}


@dataclass
class Layer:
    mixer: Mamba2 | Attention
    mlp: SwiGLU | Experts
    shared: SharedExpert | None
    mixer_norm: RMSNorm = gguf("attn_norm", dims="embd")
    mlp_norm: RMSNorm = gguf("ffn_norm", dims="embd")

    def __call__(self, x: Tensor, step: Step, o: Options) -> Tensor:
        mixed, x = step.outputs_only(self.mix(self.mixer_norm(x, o.eps), step, o), x)
        x = scaled(mixed, o.multipliers.residual) + x
        return scaled(self.feed_forward(self.mlp_norm(x, o.eps), step, o), o.multipliers.residual) + x

    def mix(self, x: Tensor, step: Step, o: Options) -> Tensor:
        if isinstance(self.mixer, Mamba2):
            return self.mixer(x, step.ctx, step.cache, o.mamba, o.eps)
        return self.mixer(x, step, o)

    def feed_forward(self, x: Tensor, step: Step, o: Options) -> Tensor:
        return feed_forward(step.ctx, x, self.mlp, o.routing, self.shared)


@dataclass
class Weights(PreNormWeights):
    layers: list[Layer] = gguf("blk")


class GraniteHybrid(HybridDecoder[Options], PreNormDecoder[Options]):
    Options = Options
    Weights = Weights
    nodes_per_group = 32

    def states(self, layer: int) -> Mapping[str, int]:
        return self.options.mamba.states if isinstance(self.weights.layers[layer].mixer, Mamba2) else {}
