"""The stack that most decoders are a variation of: Llama's (Touvron et al. 2023).

Each layer adds attention(norm(x)), then mlp(norm(x)). Attention rotates queries and keys. A family declares its own
layer with what differs: the kind of norm, of MLP, norms of queries and keys.

Multipliers (Granite, IBM 2024; after Yang et al. 2022) scale the embedding, what each part of a layer adds, and the logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from puna.errors import FileFormatError
from puna.gguf.reader import GGUFFile
from puna.ml.tensor import Tensor
from puna.model.decoder import Decoder, DecoderOptions, RopeFactors, Step
from puna.model.routing import feed_forward
from puna.nn.attention import attention
from puna.nn.declare import gguf
from puna.nn.experts import Experts, SharedExpert
from puna.nn.layers import Embedding, LayerNorm, Linear, RMSNorm
from puna.nn.mlp import GELU, GeGLU, PackedSwiGLU, SwiGLU
from puna.nn.projections import QKV


@dataclass(frozen=True)
class Multipliers:
    """1 changes nothing."""

    embedding: float = 1.0
    residual: float = 1.0  # of what attention and MLP add
    logits: float = 1.0

    @classmethod
    def read(cls, file: GGUFFile) -> Multipliers:
        """``logit_scale`` is a divisor, as Granite has it; a key of 0 is as good as none.

        Errors: FileFormatError for what is no number.
        """
        found = {key: file.metadata.number(key, 0.0) or 1.0 for key in ("embedding_scale", "residual_scale", "logit_scale")}
        for key, number in found.items():
            if not math.isfinite(number):
                raise FileFormatError(f"{file.path}: {file.metadata.full_key(key)} {number} is not usable")
        return cls(found["embedding_scale"], found["residual_scale"], 1 / found["logit_scale"])


def scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x.scale(factor)


@dataclass(frozen=True)
class PreNormOptions(DecoderOptions):
    multipliers: Multipliers = Multipliers()


@dataclass
class Attention:
    """Grouped queries, rotated."""

    qkv: QKV
    output: Linear = gguf("attn_output", dims="mixed embd")

    def __call__(self, x: Tensor, step: Step, o: DecoderOptions) -> Tensor:
        rope = o.rope_of(step.layer)
        query, key, value = self.qkv(x, o.n_heads[step.layer], o.n_kv_heads[step.layer], o.head_dim, o.head_dim_v)
        query, key = self.normalised(query, key, o)
        if rope is None:  # parts of one matrix's product are views
            query, key = query.contiguous(), key.contiguous()
        query, key = step.rotate(query, rope), step.rotate(key, rope)
        if step.temperature is not None:
            query = query * step.temperature
        return self.output(self.mixed(query, key, value, step, o))

    def normalised(self, query: Tensor, key: Tensor, o: DecoderOptions) -> tuple[Tensor, Tensor]:
        return query, key

    def mixed(self, query: Tensor, key: Tensor, value: Tensor, step: Step, o: DecoderOptions) -> Tensor:
        return attention(step.ctx, query, key, value, step.cache, o.scale)


@dataclass
class NormalisedAttention(Attention):
    """Each head's queries and keys are normalised before they are rotated (Henry et al. 2020)."""

    query_norm: RMSNorm = gguf("attn_q_norm", dims="head")
    key_norm: RMSNorm = gguf("attn_k_norm", dims="head")

    def normalised(self, query: Tensor, key: Tensor, o: DecoderOptions) -> tuple[Tensor, Tensor]:
        return self.query_norm(query, o.eps), self.key_norm(key, o.eps)


@dataclass
class PreNormLayer:
    """A family says which MLP it has, and which norms if not RMSNorm."""

    attention: Attention
    mlp: SwiGLU | GeGLU | PackedSwiGLU | GELU | Experts
    shared: SharedExpert | None  # beside routed ones
    attention_norm: RMSNorm | LayerNorm = gguf("attn_norm", dims="embd")
    mlp_norm: RMSNorm | LayerNorm = gguf("ffn_norm", dims="embd")

    def __call__(self, x: Tensor, step: Step, o: PreNormOptions) -> Tensor:
        mixed, x = step.outputs_only(self.attention(self.attention_norm(x, o.eps), step, o), x)
        x = scaled(mixed, o.multipliers.residual) + x
        return scaled(self.feed_forward(self.mlp_norm(x, o.eps), step, o), o.multipliers.residual) + x

    def feed_forward(self, x: Tensor, step: Step, o: PreNormOptions) -> Tensor:
        return feed_forward(step.ctx, x, self.mlp, o.routing, self.shared)


@dataclass
class PreNormWeights:
    factors: RopeFactors
    layers: list[Any] = gguf("blk")
    embedding: Embedding = gguf("token_embd", dims="embd vocab")
    output_norm: RMSNorm | LayerNorm = gguf("output_norm", dims="embd")
    output: Linear = gguf("output", alt="token_embd", dims="embd vocab")


OptionsT = TypeVar("OptionsT", bound=PreNormOptions)


class PreNormDecoder(Decoder[OptionsT], Generic[OptionsT]):
    def embed(self, tokens: Tensor) -> Tensor:
        return scaled(super().embed(tokens), self.options.multipliers.embedding)

    def head(self, hidden: Tensor) -> Tensor:
        return scaled(super().head(hidden), self.options.multipliers.logits)
