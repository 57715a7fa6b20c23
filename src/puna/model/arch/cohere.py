"""Command R and R+ (Cohere 2024), and Command R7B and A (Cohere 2025), which files call cohere2.

Beside Llama: attention and MLP stand side by side on one LayerNorm without biases, and both join the residual at once;
the head is the embedding table, and logits are scaled. Command R+ normalises queries and keys, each head with weights of
its own. In cohere2 three of four layers see a window and rotate; the fourth sees everything and knows no positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from puna.errors import FileFormatError
from puna.gguf.reader import GGUFFile
from puna.ml.tensor import RopeOptions, Tensor
from puna.model.decoder import LAYER_NORM_EPS, Decoder, DecoderOptions, Step
from puna.model.prenorm import Attention
from puna.model.windows import WindowedOptions
from puna.nn.declare import gguf
from puna.nn.layers import Embedding, LayerNorm, Linear
from puna.nn.mlp import SwiGLU


@dataclass(frozen=True)
class Options(DecoderOptions):
    logit_scale: float = 1.0

    is_neox: ClassVar[bool] = False
    eps_key: ClassVar[str] = LAYER_NORM_EPS

    @classmethod
    def read(cls, file: GGUFFile) -> Self:
        scale = file.metadata.number("logit_scale", 0.0) or 1.0
        if not math.isfinite(scale):
            raise FileFormatError(f"{file.path}: {file.metadata.full_key('logit_scale')} {scale} is not usable")
        return replace(super().read(file), logit_scale=scale)


@dataclass(frozen=True)
class Options2(WindowedOptions, Options):
    period: ClassVar[int] = 4

    @classmethod
    def read(cls, file: GGUFFile) -> Self:
        o = super().read(file)
        if not o.window:
            raise FileFormatError(f"{file.path}: {file.metadata.full_key('attention.sliding_window')} is missing or 0")
        return o

    def rope_of(self, layer: int) -> RopeOptions | None:
        return self.rope if self.is_windowed[layer] else None


@dataclass
class NormalisedAttention(Attention):
    query_norm: LayerNorm | None = gguf("attn_q_norm", dims="head heads", optional=True)
    key_norm: LayerNorm | None = gguf("attn_k_norm", dims="head kv_heads", optional=True)

    def normalised(self, query: Tensor, key: Tensor, o: DecoderOptions) -> tuple[Tensor, Tensor]:
        return (
            self.query_norm(query, o.eps) if self.query_norm else query,
            self.key_norm(key, o.eps) if self.key_norm else key,
        )


@dataclass
class Layer:
    attention: NormalisedAttention
    mlp: SwiGLU
    norm: LayerNorm = gguf("attn_norm", dims="embd")

    def __call__(self, x: Tensor, step: Step, o: Options) -> Tensor:
        hidden = self.norm(x, o.eps)
        mixed = self.attention(hidden, step, o)
        mixed, hidden, x = step.outputs_only(mixed, hidden, x)
        return self.mlp(hidden) + x + mixed


@dataclass
class Weights:
    embedding: Embedding = gguf("token_embd", dims="embd vocab")
    layers: list[Layer] = gguf("blk")
    output_norm: LayerNorm = gguf("output_norm", dims="embd")
    output: Linear = gguf("token_embd", dims="embd vocab")


class CommandR(Decoder[Options]):
    Options = Options
    Weights = Weights

    def head(self, hidden: Tensor) -> Tensor:
        return super().head(hidden).scale(self.options.logit_scale)


class Cohere2(CommandR):
    Options = Options2
