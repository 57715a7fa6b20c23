"""Llama 3.2 Vision (Meta 2024): Llama 3.1, with layers between that look at an image by cross attention.

Such a layer's queries come from the text; keys and values from what the encoder made of the last image before the row, or of
several whose tokens stand one after another (puna.vision.arch.mllama). Both are normalised head by head and not rotated; what
attention and MLP add is multiplied by the tanh of a learned gate. A row that no image stands before passes the layer unchanged.
One token stands for an image; it has an embedding, but is never predicted: the head has fewer rows than the embedding.

The ancestor lets rows before an image see it, and layers of a text without one be computed in some steps; the published
model is followed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Self, cast

from puna.errors import FileFormatError
from puna.gguf.reader import GGUFFile
from puna.kvcache.cache import Cache, Limits
from puna.kvcache.causal import CausalCache
from puna.kvcache.encoder import EncoderCache, SightCache
from puna.kvcache.layered import LayeredCache
from puna.ml.attention import Scoring
from puna.ml.backend import Backend, Context, Use
from puna.ml.tensor import DType, Tensor
from puna.model.decoder import Decoder, DecoderOptions, Step
from puna.model.prenorm import Attention, PreNormDecoder, PreNormOptions, PreNormWeights
from puna.nn.declare import gguf
from puna.nn.layers import Linear, RMSNorm, linears
from puna.nn.mlp import SwiGLU

CROSS_LAYERS = "attention.cross_attention_layers"


@dataclass(frozen=True)
class Options(PreNormOptions):
    looks: tuple[bool, ...] = ()  # by layer: whether it looks at images

    is_neox: ClassVar[bool] = False

    @classmethod
    def read(cls, file: GGUFFile) -> Self:
        o = super().read(file)
        listed = set(file.metadata.integers(CROSS_LAYERS))
        there = {i for i in range(o.n_layers) if f"blk.{i}.cross_attn_q_proj.weight" in file.tensors}
        if listed != there or len(there) == o.n_layers:
            key = file.metadata.full_key(CROSS_LAYERS)
            raise FileFormatError(f"{file.path}: {key} {sorted(listed)}, but layers {sorted(there)} have weights for it")
        return replace(o, looks=tuple(i in there for i in range(o.n_layers)))

    def cached(self, layer: int) -> tuple[int, int, int]:
        """Of past tokens; what layers hold of images is another cache's."""
        n_heads, *dims = super().cached(layer)
        return 0 if self.looks[layer] else n_heads, *dims  # type: ignore[return-value]  # two of them


@dataclass
class CrossAttention:
    """Grouped queries over what was encoded; neither side knows positions."""

    query_norm: RMSNorm = gguf("cross_attn_q_norm", dims="head")
    query: Linear = gguf("cross_attn_q_proj", dims="embd q")
    key_norm: RMSNorm = gguf("cross_attn_k_norm", dims="head")
    key: Linear = gguf("cross_attn_k_proj", dims="embd k")
    value: Linear = gguf("cross_attn_v_proj", dims="embd v")
    output: Linear = gguf("cross_attn_o_proj", dims="mixed embd")

    def __call__(self, x: Tensor, step: Step, o: DecoderOptions) -> Tensor:
        query = self.query_norm(self.query(x).unflatten(o.head_dim, o.n_heads[step.layer]), o.eps)
        return self.output(step.ctx.attention(query, step.cache.get(step.ctx), Scoring(o.scale)))

    def keys_and_values(self, rows: Tensor, n_kv_heads: int, o: DecoderOptions) -> tuple[Tensor, Tensor]:
        """Of an image's rows [n_embd, n]."""
        key, value = linears(rows, self.key, self.value)
        return self.key_norm(key.unflatten(o.head_dim, n_kv_heads), o.eps), value.unflatten(o.head_dim_v, n_kv_heads)


@dataclass
class Layer:
    attention: Attention | CrossAttention
    mlp: SwiGLU
    attention_norm: RMSNorm = gguf("attn_norm", dims="embd")
    mlp_norm: RMSNorm = gguf("ffn_norm", dims="embd")
    attention_gate: Tensor | None = gguf("cross_attn_attn_gate", dims="1", use=Use.VECTOR, optional=True)
    mlp_gate: Tensor | None = gguf("cross_attn_mlp_gate", dims="1", use=Use.VECTOR, optional=True)

    def __call__(self, x: Tensor, step: Step, o: PreNormOptions) -> Tensor:
        visible: Tensor | None = None
        if isinstance(self.attention, CrossAttention):
            visible = cast(SightCache, step.cache).visible() if isinstance(step.cache, LayeredCache) else None
            if visible is None:
                return x
        mixed = self._gated(self.attention(self.attention_norm(x, o.eps), step, o), self.attention_gate)
        if visible is None:
            mixed, x = step.outputs_only(mixed, x)
            x = mixed + x
            return self.mlp(self.mlp_norm(x, o.eps)) + x
        mixed, x, visible = step.outputs_only(mixed, x, visible)
        x = mixed * visible + x
        return self._gated(self.mlp(self.mlp_norm(x, o.eps)), self.mlp_gate) * visible + x

    @staticmethod
    def _gated(x: Tensor, gate: Tensor | None) -> Tensor:
        return x if gate is None else x * gate.beside(x).tanh()


@dataclass
class Weights(PreNormWeights):
    layers: list[Layer] = gguf("blk")
    output: Linear = gguf("output", alt="token_embd", dims="embd predicted")


class MLlama(PreNormDecoder[Options]):
    Options = Options
    Weights = Weights

    def __init__(self, file: GGUFFile, backend: Backend, n_ctx: int) -> None:
        super().__init__(file, backend, n_ctx)
        head = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"
        self._n_silent = self.n_vocab - file.tensors[head].shape[1]  # tokens at the end that are never predicted
        if not 0 <= self._n_silent <= file.tensors[head].shape[1]:
            rows = f"{file.tensors[head].shape[1]} rows, the embedding {self.n_vocab}"
            raise FileFormatError(f"{file.path}: the head has {rows}")

    def head(self, hidden: Tensor) -> Tensor:
        logits = super().head(hidden)
        if not self._n_silent:
            return logits
        first = logits.view((self._n_silent, logits.shape[1]), logits.strides[1:2], 0).contiguous()
        return logits.concat(first.scale(0.0, -math.inf), 0)

    def keep(self, ctx: Context, rows: Tensor, cache: Cache) -> None:
        o = self.options
        for index, layer in enumerate(self.weights.layers):
            if isinstance(layer.attention, CrossAttention):
                cache.layer(index)
                cache.put(ctx, *layer.attention.keys_and_values(rows, o.n_kv_heads[index], o))

    def make_cache(self, backend: Backend, limits: Limits, dtype: DType) -> Cache:
        """What looks at images has a part of its own, if there are eyes."""
        o = self.options
        text = cast(CausalCache, Decoder.make_cache(self, backend, limits, dtype))
        if not limits.n_encoded:
            return text
        heads = [n if looks else 0 for n, looks in zip(o.n_kv_heads, o.looks, strict=True)]
        images = EncoderCache(backend, limits, n_encoded=limits.n_encoded, n_kv_heads=heads, head_dim=o.head_dim)
        return LayeredCache([text, images], [int(looks) for looks in o.looks], limits.max_sequences)
