"""Gemma 2 (Gemma Team 2024).

Of the Gemma family's layers every other one sees a sliding window, the first of each two. Attention scores and logits are
capped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from puna.errors import FileFormatError
from puna.gguf.reader import GGUFFile
from puna.ml.tensor import Tensor
from puna.model.decoder import DecoderOptions, Step
from puna.model.gemma import GemmaDecoder, GemmaLayer, GemmaOptions, GemmaWeights, cap
from puna.model.prenorm import Attention
from puna.nn.attention import attention
from puna.nn.declare import gguf


@dataclass(frozen=True)
class Options(GemmaOptions):
    score_cap: float = 0.0  # 0: none

    period: ClassVar[int] = 2
    default_window: ClassVar[int] = 4096
    default_logit_cap: ClassVar[float] = 30.0
    n_layers_of_largest: ClassVar[int] = 46

    @classmethod
    def read(cls, file: GGUFFile) -> Self:
        o = super().read(file)
        if not o.window:
            raise FileFormatError(f"{file.path}: a window of 0 is not usable")
        return replace(o, score_cap=cap(file, "attn_logit_softcapping", 50.0))


@dataclass
class CappedAttention(Attention):
    def mixed(self, query: Tensor, key: Tensor, value: Tensor, step: Step, o: DecoderOptions) -> Tensor:
        assert isinstance(o, Options)
        return attention(step.ctx, query, key, value, step.cache, o.scale, softcap=o.score_cap)


@dataclass
class Layer(GemmaLayer):
    attention: CappedAttention


@dataclass
class Weights(GemmaWeights):
    layers: list[Layer] = gguf("blk")


class Gemma2(GemmaDecoder[Options]):
    Options = Options
    Weights = Weights
