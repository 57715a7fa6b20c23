"""Llama 4 (Meta 2025): Scout and Maverick, the language part.

Beside Llama: three of four layers attend within chunks of the context, with normalised queries and keys; the fourth sees
everything, knows no positions, and its queries grow with theirs. Some or all layers have experts, one for each token
and one that all share; the router's sigmoid weighs what goes into the expert.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from puna.errors import FileFormatError, UnsupportedModel
from puna.gguf.reader import GGUFFile
from puna.kvcache.causal import ALL
from puna.kvcache.span import Span
from puna.ml.tensor import RopeOptions, Tensor
from puna.model import prenorm
from puna.model.decoder import Step
from puna.model.prenorm import PreNormDecoder, PreNormLayer, PreNormOptions, PreNormWeights
from puna.model.routing import needed_routing
from puna.model.temperature import Temperature
from puna.model.windows import window_base, windowed_layers
from puna.nn.attention import attention
from puna.nn.declare import gguf
from puna.nn.experts import Experts, Gating
from puna.nn.mlp import SwiGLU

CHUNK = 8192  # tokens, in files that do not say; llama.cpp knows no other
PERIOD = 4  # the last of so many layers has no rotation
TEMPERATURE = 0.1
N_EXPERTS_WITHOUT_NORMS = 128  # Maverick


@dataclass(frozen=True)
class Options(PreNormOptions):
    chunk: int = CHUNK
    is_chunked: list[bool] = field(default_factory=list)  # per layer
    chunk_base: float = 0.0  # of the rotation in such layers
    has_norms: bool = True  # of queries and keys, where they rotate

    is_neox: ClassVar[bool] = False

    @classmethod
    def read(cls, file: GGUFFile) -> Self:
        o, meta = super().read(file), file.metadata
        chunk = meta.integer("attention.chunk_size", CHUNK)
        if not 1 <= chunk < 1 << 31:
            raise FileFormatError(f"{file.path}: {meta.full_key('attention.chunk_size')} {chunk} is not usable")
        if meta.integer("attention.sliding_window", chunk) == 0:
            raise UnsupportedModel(f"{file.path}: a llama4 without chunks is not supported")
        routing = replace(needed_routing(file, is_normalised=False), gating=Gating.SIGMOID)
        return replace(
            o,
            chunk=chunk,
            is_chunked=windowed_layers(file, o.n_layers, PERIOD),
            chunk_base=window_base(file, o.rope.base),
            has_norms=routing.n_experts != N_EXPERTS_WITHOUT_NORMS,
            routing=replace(routing, ranks_scores=True, weighs_inputs=True),
        )

    def rope_of(self, layer: int) -> RopeOptions | None:
        if not (layer + 1) % PERIOD:
            return None
        return replace(self.rope, base=self.chunk_base) if self.is_chunked[layer] else self.rope

    def span(self, layer: int) -> Span:
        return Span(chunk=self.chunk) if self.is_chunked[layer] else ALL


@dataclass
class Attention(prenorm.Attention):
    def __call__(self, x: Tensor, step: Step, o: Options) -> Tensor:  # type: ignore[override]  # the family's own options
        rope = o.rope_of(step.layer)
        query, key, value = self.qkv(x, o.n_heads[step.layer], o.n_kv_heads[step.layer], o.head_dim, o.head_dim_v)
        if rope:
            query, key = step.rotate(query, rope), step.rotate(key, rope)
            if o.has_norms:
                query, key = query.rms_norm(o.eps), key.rms_norm(o.eps)
        elif step.temperature is not None:
            query, key = query * step.temperature, key.contiguous()
        return self.output(attention(step.ctx, query, key, value, step.cache, o.scale))


@dataclass
class Layer(PreNormLayer):
    attention: Attention
    mlp: SwiGLU | Experts


@dataclass
class Weights(PreNormWeights):
    layers: list[Layer] = gguf("blk")


class Llama4(PreNormDecoder[Options]):
    Options = Options
    Weights = Weights

    def temperature(self, positions: Tensor) -> Tensor | None:
        return Temperature(TEMPERATURE, self.options.chunk, offset=1)(positions)
