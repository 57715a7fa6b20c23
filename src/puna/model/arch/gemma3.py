"""Gemma 3 (Gemma Team 2025), text.

Of the Gemma family's layers five of six see a sliding window and have their own rotation; the sixth sees everything.
Queries and keys are normalised. EmbeddingGemma (Schechter Vera et al. 2025) is the same as an encoder: every token sees
the whole text, or half a window to either side, and after the last norm stand two dense layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from puna.errors import FileFormatError
from puna.gguf.reader import GGUFFile
from puna.kvcache.cache import Cache, Limits
from puna.kvcache.uncached import Uncached
from puna.ml.backend import Backend, Context
from puna.ml.tensor import DType, RopeOptions, Tensor
from puna.model.gemma import GemmaDecoder, GemmaLayer, GemmaOptions, GemmaWeights
from puna.model.model import Inputs, Model
from puna.model.pooling import Pooling, pooling_of
from puna.model.prenorm import NormalisedAttention
from puna.nn.declare import gguf
from puna.nn.layers import Linear

# Of the published models only these were stretched, by 8; files made early do not say so.
STRETCHED_LAYERS = (34, 48, 62)


@dataclass(frozen=True)
class Options(GemmaOptions):
    period: ClassVar[int] = 6
    n_layers_of_largest: ClassVar[int] = 62

    @classmethod
    def read(cls, file: GGUFFile) -> Self:
        o, meta = super().read(file), file.metadata
        full = o.rope
        if not meta.has("rope.freq_base"):
            full = replace(full, base=meta.number("rope.global.freq_base", 1e6))
        is_unstated = not (meta.has("rope.scaling.factor") or meta.has("rope.scaling.type"))
        if is_unstated and o.n_layers in STRETCHED_LAYERS and 0 < o.window < meta.integer("context_length", 0):
            full = replace(full, scale=1 / 8)
        local = meta.number("rope.freq_base_swa", 0.0) or meta.number("rope.local.freq_base", 10000.0)
        for base in (full.base, local):
            if not (math.isfinite(base) and base > 0):
                raise FileFormatError(f"{file.path}: a rotation with the base {base} is not usable")
        return replace(o, rope=full, window_base=local)

    def rope_of(self, layer: int) -> RopeOptions | None:
        """Layers with a window are not stretched."""
        rope = self.rope
        local = RopeOptions(rope.n_dims, neox=True, base=self.window_base, attn_factor=rope.attn_factor)
        return local if self.is_windowed[layer] else rope


@dataclass
class Layer(GemmaLayer):
    attention: NormalisedAttention


@dataclass
class Weights(GemmaWeights):
    layers: list[Layer] = gguf("blk")


class Gemma3(GemmaDecoder[Options]):
    Options = Options
    Weights = Weights


@dataclass(frozen=True)
class EncoderOptions(Options):
    n_layers_of_largest: ClassVar[int] = 0


@dataclass
class EncoderWeights(Weights):
    wide: Linear | None = gguf("dense_2", alt="dense.0", dims="embd wide", optional=True)
    narrow: Linear | None = gguf("dense_3", alt="dense.1", dims="wide embd", optional=True)


class EmbeddingGemma(GemmaDecoder[EncoderOptions]):
    Options = EncoderOptions
    Weights = EncoderWeights

    sees_whole_text: Literal[True] = True

    def __init__(self, file: GGUFFile, backend: Backend, n_ctx: int) -> None:
        super().__init__(file, backend, n_ctx)
        self.embeds = True

    def forward(self, ctx: Context, inputs: Inputs, cache: Cache) -> Tensor:
        """Hidden states [n_embd, n_outputs]."""
        hidden = super().forward(ctx, inputs, cache)
        # They are linear, so that it makes no difference to pool before or after them.
        for dense in (self.weights.wide, self.weights.narrow):
            hidden = dense(hidden) if dense else hidden
        return hidden

    def make_cache(self, backend: Backend, limits: Limits, dtype: DType) -> Cache:
        o = self.options
        return Uncached([o.window if is_windowed else 0 for is_windowed in o.is_windowed])


def open_gemma3(file: GGUFFile, backend: Backend, n_ctx: int) -> Model:
    """A file with a pooling is an EmbeddingGemma as the ancestor wrote it."""
    return Gemma3(file, backend, n_ctx) if pooling_of(file) is Pooling.NONE else EmbeddingGemma(file, backend, n_ctx)
