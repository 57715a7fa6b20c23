"""gpt-oss (OpenAI 2025), the 20B and 120B models with open weights.

Beside Llama: experts in every layer, biases everywhere, attention sinks (Xiao et al. 2023) as a learned score per head,
a window on every other layer, YaRN on all, and a SwiGLU that clamps and adds one to what it gates. The softmax of the
router is over the chosen experts alone. Files keep the experts in MXFP4, 4 bits with a scale for each 32 values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from puna.gguf.reader import GGUFFile
from puna.ml.backend import Use
from puna.ml.tensor import Tensor
from puna.model.decoder import Decoder, Step
from puna.model.routing import needed_routing
from puna.model.windows import WindowedOptions
from puna.nn import experts
from puna.nn.attention import attention
from puna.nn.declare import gguf
from puna.nn.experts import Gating, PackedGateUp, SeparateGateUp
from puna.nn.layers import Embedding, Linear, RMSNorm
from puna.nn.projections import QKV

ALPHA, LIMIT = 1.702, 7.0  # of the gated activation


@dataclass(frozen=True)
class Options(WindowedOptions):
    period: ClassVar[int] = 2

    @classmethod
    def read(cls, file: GGUFFile) -> Self:
        o = super().read(file)
        if not file.metadata.has("rope.scaling.type"):  # the ancestor's files: YaRN is meant
            o = replace(o, rope=replace(o.rope, ext_factor=float(o.rope.scale != 1.0)))
        return replace(o, routing=replace(needed_routing(file, is_normalised=False), gating=Gating.SOFTMAX_OF_CHOSEN))


@dataclass
class Attention:
    qkv: QKV
    output: Linear = gguf("attn_output", alt="attn_out", dims="mixed embd")
    sinks: Tensor = gguf("attn_sinks.weight", alt="attn_sinks", dims="heads", use=Use.VECTOR)

    def __call__(self, x: Tensor, step: Step, o: Options) -> Tensor:
        rope = o.rope_of(step.layer)
        query, key, value = self.qkv(x, o.n_heads[step.layer], o.n_kv_heads[step.layer], o.head_dim, o.head_dim_v)
        query, key = step.rotate(query, rope), step.rotate(key, rope)
        return self.output(attention(step.ctx, query, key, value, step.cache, o.scale, sinks=self.sinks))


@dataclass
class InterleavedGateUp(PackedGateUp):
    """Gate and up in turn, row by row: files of the ancestor."""

    def __call__(self, x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        y = self.both(x, chosen)
        width, n_used, n, _ = y.shape

        def every_other(begin: int) -> Tensor:
            apart = y.view((1, width // 2, n_used, n), (8, 4 * width, 4 * width * n_used), 4 * begin)
            return apart.contiguous().reshape(width // 2, n_used, n)

        return every_other(0), every_other(1)


@dataclass
class Experts(experts.Experts):
    gate_up: SeparateGateUp | InterleavedGateUp


@dataclass
class Layer:
    attention: Attention
    experts: Experts
    attention_norm: RMSNorm = gguf("attn_norm", dims="embd")
    experts_norm: RMSNorm = gguf("post_attention_norm", alt="ffn_norm", dims="embd")

    def __call__(self, x: Tensor, step: Step, o: Options) -> Tensor:
        mixed, x = step.outputs_only(self.attention(self.attention_norm(x, o.eps), step, o), x)
        x = mixed + x
        assert o.routing is not None, "needed_routing"
        return self.experts(step.ctx, self.experts_norm(x, o.eps), o.routing, activation) + x


def activation(gate: Tensor, up: Tensor) -> Tensor:
    return gate.swiglu_clamped(up, ALPHA, LIMIT)


@dataclass
class Weights:
    embedding: Embedding = gguf("token_embd", dims="embd vocab")
    layers: list[Layer] = gguf("blk")
    output_norm: RMSNorm = gguf("output_norm", dims="embd")
    output: Linear = gguf("output", alt="token_embd", dims="embd vocab")


class GptOss(Decoder[Options]):
    Options = Options
    Weights = Weights
