"""Mamba-2 (Dao & Gu 2024): a stack of state spaces without attention, MLPs and positions.

A sequence takes the same memory however long it is, so nothing limits the context but what the model learnt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from puna.errors import FileFormatError
from puna.gguf.layers import n_stored_layers
from puna.gguf.reader import GGUFFile
from puna.ml.tensor import RopeOptions, Tensor
from puna.model.decoder import Step, norm_eps
from puna.model.hybrid import HybridDecoder, HybridOptions, HybridWeights
from puna.model.mamba import mamba_shape
from puna.nn.declare import gguf
from puna.nn.layers import RMSNorm
from puna.nn.mamba2 import Mamba2, MambaShape


@dataclass(frozen=True)
class Options(HybridOptions):
    mamba: MambaShape = MambaShape(1, 1, 1, 1, 1)

    @classmethod
    def read(cls, file: GGUFFile) -> Self:
        """Files state no heads of attention, or none of any meaning."""
        n_layers, n_embd = n_stored_layers(file.metadata), file.metadata.integer("embedding_length")
        if n_embd < 1:
            raise FileFormatError(f"{file.path}: {n_layers} layers, {n_embd} wide is no model")
        return cls(
            n_layers=n_layers,
            n_embd=n_embd,
            n_heads=[0] * n_layers,
            n_kv_heads=[0] * n_layers,
            head_dim=0,
            head_dim_v=0,
            eps=norm_eps(file),
            scale=1.0,
            rope=RopeOptions(n_dims=0),
            mamba=mamba_shape(file),
        )

    def dims(self, layer: int) -> dict[str, int]:
        return self.mamba.dims


@dataclass
class Layer:
    mixer: Mamba2
    norm: RMSNorm = gguf("attn_norm", dims="embd")

    def __call__(self, x: Tensor, step: Step, o: Options) -> Tensor:
        mixed, x = step.outputs_only(self.mixer(self.norm(x, o.eps), step.ctx, step.cache, o.mamba, o.eps), x)
        return mixed + x


@dataclass
class Weights(HybridWeights):
    layers: list[Layer] = gguf("blk")


class Mamba2Model(HybridDecoder[Options]):
    Options = Options
    Weights = Weights
    nodes_per_group = 32

    def states(self, layer: int) -> Mapping[str, int]:
        return self.options.mamba.states
