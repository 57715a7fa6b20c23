"""Qwen3-Next (Qwen Team 2025) and Qwen 3.5 after it: three layers in four are gated delta nets, the others attend.

Unlike Llama: the query matrix gives each head a gate as well, a sigmoid of which its output is multiplied with; queries
and keys are normalised, and only the first part of a head is rotated; the norm before the MLP is stored as
``post_attention_norm``. Qwen3-Next and the larger Qwen 3.5 have experts and a shared one with a gate of its own. The two
families order the heads of the delta net differently. Pairs of heads of Qwen 3.5 turn by time, height and width, one after
another (interleaved M-RoPE), as in Qwen 3-VL: it sees images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from puna.errors import FileFormatError
from puna.gguf.reader import GGUFFile
from puna.ml.tensor import SectionOrder, Sections, Tensor
from puna.model.decoder import Step
from puna.model.hybrid import HybridDecoder, HybridOptions, HybridWeights, state_sizes
from puna.model.rope import SECTION_KEYS, rope_sections
from puna.model.routing import feed_forward, routing_of
from puna.nn.attention import attention
from puna.nn.declare import gguf
from puna.nn.delta_net import DeltaNetShape, GatedDeltaNet
from puna.nn.experts import Experts, GatedSharedExpert
from puna.nn.layers import Linear, RMSNorm
from puna.nn.mlp import SwiGLU


@dataclass(frozen=True)
class Options(HybridOptions):
    delta_net: DeltaNetShape = DeltaNetShape(1, 1, 1, 1, False)

    is_interleaved: ClassVar[bool] = True

    @classmethod
    def read(cls, file: GGUFFile) -> Self:
        o = super().read(file)
        if o.head_dim != o.head_dim_v:
            raise FileFormatError(f"{file.path}: keys of {o.head_dim} and values of {o.head_dim_v}: their gates would not fit")
        return replace(o, delta_net=delta_net_shape(file, cls.is_interleaved), routing=routing_of(file, is_normalised=True))

    def dims(self, layer: int) -> dict[str, int]:
        return {**super().dims(layer), **self.delta_net.dims}


@dataclass(frozen=True)
class Qwen35Options(Options):
    is_interleaved: ClassVar[bool] = False

    @classmethod
    def read(cls, file: GGUFFile) -> Self:
        o = super().read(file)
        return replace(o, rope=replace(o.rope, sections=_sections(file, o.rope.n_dims // 2)))


def delta_net_shape(file: GGUFFile, is_interleaved: bool) -> DeltaNetShape:
    """Read ``ssm.*``, whose names are those of another kind of layer; the argument holds where the file does not say.

    Errors: FileFormatError naming what does not fit.
    """
    keys = ("ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", "ssm.group_count")
    conv, inner, dim, n_heads, n_key_heads = state_sizes(file, *keys)
    if conv < 2 or n_heads % n_key_heads or inner != dim * n_heads:
        what = f"{n_heads} heads of values, {n_key_heads} of keys, {dim} and in all {inner} wide, a convolution of {conv}"
        raise FileFormatError(f"{file.path}: {what} make no delta net ({file.architecture}.ssm.*)")
    is_reordered = file.metadata.boolean("ssm.v_head_reordered", not is_interleaved)
    return DeltaNetShape(n_heads, n_key_heads, dim, conv, is_interleaved=not is_reordered)


def _sections(file: GGUFFile, n_pairs: int) -> Sections:
    """Pairs take turns between time, height and width. Sections of no pairs at all are none: all turn by time.

    Errors: FileFormatError also for a pair of no section, which would not be rotated at all.
    """
    key = next((key for key in SECTION_KEYS if file.metadata.has(key)), "")
    if not key or not any(file.metadata.integers(key)):
        return Sections((n_pairs, 0, 0, 0))
    found = rope_sections(file, SectionOrder.INTERLEAVED, ())
    if any(i >= 3 * found.n_pairs[i % 3] for i in range(n_pairs)):
        what = f"{file.metadata.full_key(key)} {list(found.n_pairs[:3])}"
        raise FileFormatError(f"{file.path}: {what} do not cover the {n_pairs} pairs that are rotated")
    return found


@dataclass
class GatedAttention:
    query_gate: Linear = gguf("attn_q", dims="embd 2*q")  # of each head the query, then the gate
    key: Linear = gguf("attn_k", dims="embd k")
    value: Linear = gguf("attn_v", dims="embd v")
    output: Linear = gguf("attn_output", dims="mixed embd")
    query_norm: RMSNorm = gguf("attn_q_norm", dims="head")
    key_norm: RMSNorm = gguf("attn_k_norm", dims="head")

    def __call__(self, x: Tensor, step: Step, o: Options) -> Tensor:
        n, dim, n_heads, n_kv_heads = x.shape[1], o.head_dim, o.n_heads[step.layer], o.n_kv_heads[step.layer]
        both = self.query_gate(x)
        query, gate = (both.view((dim, n_heads, n), (8 * dim, 8 * dim * n_heads), 4 * begin) for begin in (0, dim))
        query = step.rotate(self.query_norm(query, o.eps), o.rope)
        key = step.rotate(self.key_norm(self.key(x).reshape(dim, n_kv_heads, n), o.eps), o.rope)
        value = self.value(x).reshape(dim, n_kv_heads, n)
        mixed = attention(step.ctx, query, key, value, step.cache, o.scale)
        return self.output(mixed * gate.contiguous().reshape(dim * n_heads, n).sigmoid())


@dataclass
class Layer:
    mixer: GatedAttention | GatedDeltaNet
    mlp: SwiGLU | Experts
    shared_expert: GatedSharedExpert | None
    mixer_norm: RMSNorm = gguf("attn_norm", dims="embd")
    mlp_norm: RMSNorm = gguf("post_attention_norm", dims="embd")

    def __call__(self, x: Tensor, step: Step, o: Options) -> Tensor:
        mixed, x = step.outputs_only(self.mix(self.mixer_norm(x, o.eps), step, o), x)
        x = mixed + x
        return self.feed_forward(self.mlp_norm(x, o.eps), step, o) + x

    def mix(self, x: Tensor, step: Step, o: Options) -> Tensor:
        if isinstance(self.mixer, GatedDeltaNet):
            return self.mixer(x, step.ctx, step.cache, o.delta_net, o.eps)
        return self.mixer(x, step, o)

    def feed_forward(self, x: Tensor, step: Step, o: Options) -> Tensor:
        return feed_forward(step.ctx, x, self.mlp, o.routing, self.shared_expert)


@dataclass
class Weights(HybridWeights):
    layers: list[Layer] = gguf("blk")


class Qwen3Next(HybridDecoder[Options]):
    Options = Options
    Weights = Weights
    nodes_per_group = 40

    def states(self, layer: int) -> Mapping[str, int]:
        is_recurrent = isinstance(self.weights.layers[layer].mixer, GatedDeltaNet)
        return self.options.delta_net.states if is_recurrent else {}


class Qwen35(Qwen3Next):
    Options = Qwen35Options
    has_axes = True
