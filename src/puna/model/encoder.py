"""Encoders of texts after BERT (Devlin et al. 2018): every token sees the whole text, norms stand after what they norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from puna.errors import UnsupportedModel
from puna.gguf.reader import GGUFFile
from puna.gguf.types import TensorType
from puna.kvcache.cache import Cache, Limits
from puna.kvcache.uncached import Uncached
from puna.ml.backend import Backend, Context, Use
from puna.ml.tensor import DType, Tensor
from puna.model.decoder import Decoder, DecoderOptions, Step
from puna.model.model import Inputs
from puna.nn.attention import attention
from puna.nn.declare import gguf
from puna.nn.layers import Embedding, LayerNorm, Linear
from puna.nn.mlp import GELU, SwiGLU
from puna.nn.projections import QKV


@dataclass
class EncoderAttention:
    qkv: QKV
    output: Linear = gguf("attn_output", dims="mixed embd")

    def __call__(self, x: Tensor, step: Step, o: DecoderOptions) -> Tensor:
        query, key, value = self.qkv(x, o.n_heads[step.layer], o.n_kv_heads[step.layer], o.head_dim, o.head_dim_v)
        rope = o.rope_of(step.layer)
        query, key = step.rotate(query, rope), step.rotate(key, rope)
        return self.output(attention(step.ctx, query, key, value, step.cache, o.scale))


@dataclass
class EncoderLayer:
    attention: EncoderAttention
    mlp: GELU | SwiGLU
    attention_norm: LayerNorm = gguf("attn_output_norm", dims="embd")
    mlp_norm: LayerNorm = gguf("layer_output_norm", dims="embd")

    def __call__(self, x: Tensor, step: Step, o: DecoderOptions) -> Tensor:
        mixed, x = step.outputs_only(self.attention(x, step, o), x)
        x = self.attention_norm(mixed + x, o.eps)
        return self.mlp_norm(self.mlp(x) + x, o.eps)


@dataclass
class EncoderWeights:
    layers: list[Any] = gguf("blk")
    embedding: Embedding = gguf("token_embd", dims="embd vocab")
    embedding_norm: LayerNorm = gguf("token_embd_norm", dims="embd")
    segments: Tensor | None = gguf("token_types.weight", dims="embd segments", use=Use.VECTOR, optional=True)


OptionsT = TypeVar("OptionsT", bound=DecoderOptions)


class TextEncoder(Decoder[OptionsT], Generic[OptionsT]):
    """Weights have an embedding_norm instead of a head. All tokens are of segment 0."""

    sees_whole_text: Literal[True] = True

    def __init__(self, file: GGUFFile, backend: Backend, n_ctx: int) -> None:
        segments = file.tensors.get("token_types.weight")
        if segments and segments.type is not TensorType.F32:
            raise UnsupportedModel(f"{file.path}: token_types.weight must be of type F32")
        super().__init__(file, backend, n_ctx)
        self.embeds = True

    def forward(self, ctx: Context, inputs: Inputs, cache: Cache) -> Tensor:
        """Hidden states [n_embd, n_outputs]."""
        o, w = self.options, self.weights
        step = Step(ctx, inputs, cache, None)
        x: Tensor = self.enter(inputs.placed(self.embed(inputs.tokens)), step)
        if w.segments is not None:
            x = x + ctx.use(w.segments).view((o.n_embd,), (), 0)
        x = w.embedding_norm(x, o.eps)
        for i, layer in enumerate(w.layers):
            step.layer, step.is_last = i, i == o.n_layers - 1
            cache.layer(i)
            x = layer(x, step, o)
        return x

    def make_cache(self, backend: Backend, limits: Limits, dtype: DType) -> Cache:
        return Uncached()
