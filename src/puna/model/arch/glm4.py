"""GLM-4 0414, 9B and 32B, and GLM-Z1 (Zhipu AI 2025); the language model of GLM-4.1V.

Beside Llama: norms after attention and MLP too, gate and up in one matrix, biases on queries, keys and values where the
file has them, and a rotation of the first half of each head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from puna.gguf.reader import GGUFFile
from puna.ml.tensor import Tensor
from puna.model import prenorm
from puna.model.decoder import Decoder, DecoderOptions, Step
from puna.nn.declare import gguf
from puna.nn.layers import Embedding, Linear, PreciseFeedForwardLinear, PreciseLinear, RMSNorm
from puna.nn.mlp import PackedSwiGLU


@dataclass(frozen=True)
class Options(DecoderOptions):
    is_neox: ClassVar[bool] = False

    @classmethod
    def read(cls, file: GGUFFile) -> Self:
        o = super().read(file)
        # With sections for the axes of images the pairs are halves of the rotated part; text moves along all axes at once.
        sections = file.metadata.integers("rope.dimension_sections", [])
        return replace(o, rope=replace(o.rope, neox=len(sections) > 1 and min(sections[:2]) > 0))


@dataclass
class Attention(prenorm.Attention):
    output: PreciseLinear = gguf("attn_output", dims="mixed embd")


@dataclass
class MLP(PackedSwiGLU):
    down: PreciseFeedForwardLinear = gguf("ffn_down", dims="ff embd")


@dataclass
class Layer:
    attention: Attention
    mlp: MLP
    attention_norm: RMSNorm = gguf("attn_norm", dims="embd")
    attention_post_norm: RMSNorm = gguf("post_attention_norm", dims="embd")
    mlp_norm: RMSNorm = gguf("ffn_norm", dims="embd")
    mlp_post_norm: RMSNorm = gguf("post_ffw_norm", dims="embd")

    def __call__(self, x: Tensor, step: Step, o: Options) -> Tensor:
        mixed, x = step.outputs_only(self.attention(self.attention_norm(x, o.eps), step, o), x)
        x = self.attention_post_norm(mixed, o.eps) + x
        return self.mlp_post_norm(self.mlp(self.mlp_norm(x, o.eps)), o.eps) + x


@dataclass
class Weights:
    embedding: Embedding = gguf("token_embd", dims="embd vocab")
    layers: list[Layer] = gguf("blk")
    output_norm: RMSNorm = gguf("output_norm", dims="embd")
    output: Linear = gguf("output", alt="token_embd", dims="embd vocab")


class Glm4(Decoder[Options]):
    Options = Options
    Weights = Weights
