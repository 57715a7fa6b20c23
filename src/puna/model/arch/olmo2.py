"""OLMo 2 (OLMo Team 2024), and OLMo 3 (2025), which files call olmo2 as well.

Beside Llama: norms only after attention and MLP, and one over all queries and all keys before they are cut into heads.
OLMo 3 has windows on three of four layers; those rotate plainly, the others stretch positions by YaRN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from puna.ml.tensor import RopeOptions, Tensor
from puna.model.decoder import Decoder, Step
from puna.model.windows import WindowedOptions
from puna.nn.attention import attention
from puna.nn.declare import gguf
from puna.nn.layers import Embedding, Linear, RMSNorm
from puna.nn.mlp import SwiGLU


@dataclass(frozen=True)
class Options(WindowedOptions):
    period: ClassVar[int] = 4

    def rope_of(self, layer: int) -> RopeOptions:
        rope = self.rope
        return RopeOptions(rope.n_dims, rope.neox, rope.base) if self.is_windowed[layer] else rope


@dataclass
class Attention:
    query: Linear = gguf("attn_q", dims="embd q")
    key: Linear = gguf("attn_k", dims="embd k")
    value: Linear = gguf("attn_v", dims="embd v")
    output: Linear = gguf("attn_output", dims="mixed embd")
    query_norm: RMSNorm = gguf("attn_q_norm", dims="q")
    key_norm: RMSNorm = gguf("attn_k_norm", dims="k")

    def __call__(self, x: Tensor, step: Step, o: Options) -> Tensor:
        n, n_heads, n_kv_heads = x.shape[1], o.n_heads[step.layer], o.n_kv_heads[step.layer]
        query = self.query_norm(self.query(x), o.eps).reshape(o.head_dim, n_heads, n)
        key = self.key_norm(self.key(x), o.eps).reshape(o.head_dim, n_kv_heads, n)
        value = self.value(x).reshape(o.head_dim_v, n_kv_heads, n)
        query, key = step.rotate(query, o.rope_of(step.layer)), step.rotate(key, o.rope_of(step.layer))
        return self.output(attention(step.ctx, query, key, value, step.cache, o.scale))


@dataclass
class Layer:
    attention: Attention
    mlp: SwiGLU
    attention_norm: RMSNorm = gguf("post_attention_norm", dims="embd")
    mlp_norm: RMSNorm = gguf("post_ffw_norm", dims="embd")

    def __call__(self, x: Tensor, step: Step, o: Options) -> Tensor:
        mixed, x = step.outputs_only(self.attention(x, step, o), x)
        x = self.attention_norm(mixed, o.eps) + x
        return self.mlp_norm(self.mlp(x), o.eps) + x


@dataclass
class Weights:
    embedding: Embedding = gguf("token_embd", dims="embd vocab")
    layers: list[Layer] = gguf("blk")
    output_norm: RMSNorm = gguf("output_norm", dims="embd")
    output: Linear = gguf("output", alt="token_embd", dims="embd vocab")


class Olmo2(Decoder[Options]):
    Options = Options
    Weights = Weights
