"""Nemotron-H (NVIDIA 2025) and Nemotron 3 Nano: each layer is one thing only, Mamba-2, attention or an MLP.

Unlike Llama: attention knows no positions; MLPs have no gate and the activation relu². The larger models have experts in
place of MLPs, chosen by sigmoids with a bias, beside a shared one; some of them work in a narrower space.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from puna.gguf.reader import GGUFFile
from puna.ml.backend import Context, Use
from puna.ml.tensor import RopeOptions, Tensor
from puna.model.decoder import Step
from puna.model.hybrid import HybridDecoder, HybridOptions, HybridWeights, state_sizes
from puna.model.mamba import mamba_shape
from puna.model.prenorm import Attention
from puna.model.routing import routing_of
from puna.nn.declare import gguf
from puna.nn.experts import ExpertLinear, Gating, Routing, choose, weighted_sum
from puna.nn.layers import FeedForwardLinear, Linear, RMSNorm
from puna.nn.mamba2 import Mamba2, MambaShape
from puna.nn.mlp import ReLUSquared


@dataclass(frozen=True)
class Options(HybridOptions):
    mamba: MambaShape = MambaShape(1, 1, 1, 1, 1)
    latent: int = 0  # width of what goes into experts

    @classmethod
    def read(cls, file: GGUFFile) -> Self:
        o = super().read(file)
        is_narrow = any(name.endswith(".ffn_latent_down.weight") for name in file.tensors)
        is_stated = file.metadata.integer("moe_latent_size", 0) != 0
        return replace(
            o,
            mamba=mamba_shape(file),
            routing=routing_of(file, gating=Gating.SIGMOID),
            latent=state_sizes(file, "moe_latent_size")[0] if is_narrow and is_stated else o.n_embd,
        )

    def rope_of(self, layer: int) -> RopeOptions | None:
        return None

    def dims(self, layer: int) -> dict[str, int]:
        return {**super().dims(layer), **self.mamba.dims, "latent": self.latent}


@dataclass
class Latent:
    """The narrower space in which the experts work."""

    down: Linear = gguf("ffn_latent_down", dims="embd latent")
    up: Linear = gguf("ffn_latent_up", dims="latent embd")


@dataclass
class Experts:
    latent: Latent | None  # None: experts are as wide as the model
    router: Linear = gguf("ffn_gate_inp", dims="embd experts")
    selection_bias: Tensor = gguf("exp_probs_b.bias", dims="experts", use=Use.VECTOR)
    up: ExpertLinear = gguf("ffn_up_exps", dims="latent ff_expert experts")
    down: ExpertLinear = gguf("ffn_down_exps", dims="ff_expert latent experts")
    shared_up: FeedForwardLinear = gguf("ffn_up_shexp", dims="embd ff_shared")
    shared_down: FeedForwardLinear = gguf("ffn_down_shexp", dims="ff_shared embd")

    def __call__(self, ctx: Context, x: Tensor, routing: Routing) -> Tensor:
        """X [n_embd, n] to [n_embd, n]."""
        experts, weights = choose(ctx, self.router(x), routing, self.selection_bias)
        narrow = x if self.latent is None else self.latent.down(x)
        each = narrow.reshape(narrow.shape[0], 1, narrow.shape[1])
        outputs = self.down(self.up(each, experts).relu().square(), experts)
        routed = weighted_sum(outputs, weights)
        if self.latent is not None:
            routed = self.latent.up(routed)
        return routed + self.shared_down(self.shared_up(x).relu().square())


@dataclass
class Layer:
    part: Mamba2 | Attention | Experts | ReLUSquared
    norm: RMSNorm = gguf("attn_norm", dims="embd")

    def __call__(self, x: Tensor, step: Step, o: Options) -> Tensor:
        y, x = step.outputs_only(self.compute(self.norm(x, o.eps), step, o), x)
        return y + x

    def compute(self, x: Tensor, step: Step, o: Options) -> Tensor:
        if isinstance(self.part, Mamba2):
            return self.part(x, step.ctx, step.cache, o.mamba, o.eps)
        if isinstance(self.part, Attention):
            return self.part(x, step, o)
        if isinstance(self.part, ReLUSquared):
            return self.part(x)
        assert o.routing is not None, "routing_of refuses a file that has experts and states none"
        return self.part(step.ctx, x, o.routing)


@dataclass
class Weights(HybridWeights):
    layers: list[Layer] = gguf("blk")


class NemotronH(HybridDecoder[Options]):
    Options = Options
    Weights = Weights
    nodes_per_group = 32

    def states(self, layer: int) -> Mapping[str, int]:
        return self.options.mamba.states if isinstance(self.weights.layers[layer].part, Mamba2) else {}
