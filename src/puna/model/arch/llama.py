"""Llama (Touvron et al. 2023) and the many models of its shape: Llama 2 and 3, Mistral 7B, SmolLM, TinyLlama, Yi, …

Pre-norm with RMSNorm, rotary positions on neighbouring pairs, grouped-query attention, SwiGLU. Biases, frequency
factors (Llama 3.1) and an own output matrix are used where the file has them; Mixtral's layers have experts instead of
one MLP.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from puna.gguf.reader import GGUFFile
from puna.ml.tensor import Tensor
from puna.model.decoder import Decoder, DecoderOptions, RopeFactors, Step
from puna.model.routing import routing_of
from puna.nn.attention import attention
from puna.nn.declare import gguf
from puna.nn.experts import Experts, Routing
from puna.nn.layers import Embedding, Linear, RMSNorm
from puna.nn.mlp import SwiGLU
from puna.nn.projections import SeparateQKV


@dataclass(frozen=True)
class Options(DecoderOptions):
    routing: Routing | None = None

    is_neox: ClassVar[bool] = False

    @classmethod
    def read(cls, file: GGUFFile) -> Self:
        return replace(super().read(file), routing=routing_of(file, is_normalised=True))


@dataclass
class Attention:
    qkv: SeparateQKV
    output: Linear = gguf("attn_output", dims="mixed embd")

    def __call__(self, x: Tensor, step: Step, o: Options) -> Tensor:
        query, key, value = self.qkv(x, o.n_heads[step.layer], o.n_kv_heads[step.layer], o.head_dim, o.head_dim_v)
        query = query.rope(step.inputs.positions, o.rope, step.factors)
        key = key.rope(step.inputs.positions, o.rope, step.factors)
        return self.output(attention(step.ctx, query, key, value, step.cache, o.scale))


@dataclass
class Layer:
    attention: Attention
    mlp: SwiGLU | Experts
    attention_norm: RMSNorm = gguf("attn_norm", dims="embd")
    mlp_norm: RMSNorm = gguf("ffn_norm", dims="embd")

    def __call__(self, x: Tensor, step: Step, o: Options) -> Tensor:
        mixed, x = step.outputs_only(self.attention(self.attention_norm(x, o.eps), step, o), x)
        x = mixed + x
        hidden = self.mlp_norm(x, o.eps)
        if isinstance(self.mlp, SwiGLU):
            return self.mlp(hidden) + x
        assert o.routing is not None, "routing_of refuses a file that has experts and states none"
        return self.mlp(step.ctx, hidden, o.routing) + x


@dataclass
class Weights:
    factors: RopeFactors
    embedding: Embedding = gguf("token_embd", dims="embd vocab")
    layers: list[Layer] = gguf("blk")
    output_norm: RMSNorm = gguf("output_norm", dims="embd")
    output: Linear = gguf("output", alt="token_embd", dims="embd vocab")


class Llama(Decoder[Options]):
    Options = Options
    Weights = Weights
