"""Gemma 3n E2B and E4B (Gemma Team 2025), text.

Of the Gemma family, with several residual streams, of which each layer computes with one and predicts the others (AltUp,
Baykal et al. 2023); a low-rank path beside attention (LAuReL, Menghani et al. 2024); a short vector for each token and
layer; sparse MLPs in the first layers. The last layers attend to what earlier ones have cached.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from puna.errors import FileFormatError
from puna.gguf.reader import GGUFFile
from puna.ml.backend import Backend, Use
from puna.ml.tensor import RopeOptions, Tensor
from puna.model.decoder import Step
from puna.model.gemma import GemmaDecoder, GemmaOptions
from puna.model.per_layer import PerLayerGate, PerLayerInputs, part
from puna.model.shared_keys import check_own_keys, donors
from puna.nn.attention import attention
from puna.nn.declare import gguf
from puna.nn.layers import Embedding, Linear, RMSNorm, linears
from puna.nn.mlp import GatedMLP

# What llama.cpp knows without asking the file.
N_STREAMS, N_OWN_KEYS, N_SPARSE_LAYERS, WINDOW_BASE, LOGIT_CAP = 4, 20, 10, 10000.0, 30.0
SPARSITY = 1.6448533535003662  # standard deviations: 95 of 100 of a normal distribution lie below


@dataclass(frozen=True)
class Options(GemmaOptions):
    n_streams: int = N_STREAMS
    active: int = 0  # the stream that layers compute with
    n_given: int = 0  # values of a token's vector for each layer
    donors: list[int] = field(default_factory=list)  # per layer, whose keys and values it attends to
    sparsity: list[float] = field(default_factory=list)  # per layer; 0: dense

    period: ClassVar[int] = 5

    @classmethod
    def read(cls, file: GGUFFile) -> Self:
        o, meta = super().read(file), file.metadata
        n_streams, active = meta.integer("altup.num_inputs", N_STREAMS), meta.integer("altup.active_idx", 0)
        n_given = meta.integer("embedding_length_per_layer_input", 256)
        base = meta.number("rope.freq_base_swa", meta.number("rope.freq_base_local", WINDOW_BASE))
        sparse = [SPARSITY] * min(N_SPARSE_LAYERS, o.n_layers)
        sparsity = meta.numbers("activation_sparsity_scale", sparse + [0.0] * (o.n_layers - len(sparse)))
        if not (2 <= n_streams <= 64 and 0 <= active < n_streams and n_given >= 1 and math.isfinite(base) and base > 0):
            raise FileFormatError(
                f"{file.path}: {n_streams} streams, {active} active, {n_given} values for each layer, base {base}"
            )
        if active:
            raise FileFormatError(f"{file.path}: {meta.full_key('altup.active_idx')} {active}: only the first can be active")
        if len(sparsity) != o.n_layers or not all(math.isfinite(number) for number in sparsity):
            raise FileFormatError(f"{file.path}: {meta.full_key('activation_sparsity_scale')} does not fit {o.n_layers} layers")
        return replace(
            o,
            scale=1.0,
            logit_cap=LOGIT_CAP,
            window_base=base,
            n_streams=n_streams,
            active=active,
            n_given=n_given,
            donors=donors(file, o.is_windowed, max(0, o.n_layers - N_OWN_KEYS)),
            sparsity=sparsity,
        )

    def rope_of(self, layer: int) -> RopeOptions:
        """Layers with a window are not stretched."""
        rope = self.rope
        local = RopeOptions(rope.n_dims, neox=True, base=self.window_base, attn_factor=rope.attn_factor)
        return local if self.is_windowed[layer] else rope

    def cached(self, layer: int) -> tuple[int, int, int]:
        n_heads, head_dim_k, head_dim_v = super().cached(layer)
        return n_heads if self.donors[layer] == layer else 0, head_dim_k, head_dim_v

    def model_dims(self) -> dict[str, int]:
        streams = {"streams": self.n_streams, "others": self.n_streams - 1}
        return {**super().model_dims(), **streams, "given": self.n_given, "given_all": self.n_given * self.n_layers}

    def dims(self, layer: int) -> dict[str, int]:
        return {**super().dims(layer), "coefficients": self.n_streams**2}


def length(x: Tensor) -> Tensor:
    """Of each vector."""
    return x.square().sum_rows().sqrt()


@dataclass
class Streams:
    """AltUp: which stream becomes how much of which is predicted before a layer, and corrected after it."""

    router: Linear = gguf("altup_router", dims="embd streams")
    router_norm: RMSNorm = gguf("altup_router_norm", dims="embd")
    predict: Linear = gguf("altup_predict_coef", dims="streams coefficients")
    correct: Linear = gguf("altup_correct_coef", dims="streams streams")
    scale: Tensor = gguf("altup_correct_scale.weight", dims="embd", use=Use.VECTOR)

    def modalities(self, x: Tensor, o: Options) -> Tensor:
        """X [n_embd, n] to [n_streams, n]."""
        return self.router(self.router_norm(x, o.eps).scale(1 / o.n_embd)).tanh()

    def predicted(self, x: Tensor, o: Options) -> Tensor:
        """X [n_embd, n, n_streams] to the same."""
        coefficients = self.predict(self.modalities(part(x, o.active), o)).reshape(o.n_streams, o.n_streams, x.shape[1])
        each = x.permute(1, 2, 0, 3).contiguous().mul_mat(coefficients)  # [n_embd, n_streams, n]
        return each.permute(0, 2, 1, 3).contiguous() + x

    def corrected(self, predicted: Tensor, active: Tensor, o: Options) -> Tensor:
        """By what the layer made of its stream, [n_embd, n], every stream is moved."""
        n_embd, n = active.shape[:2]
        coefficients = self.correct(self.modalities(active, o)).scale(1.0, 1.0)
        coefficients = coefficients.permute(1, 0, 2, 3).contiguous().reshape(1, n, o.n_streams)
        innovation = (active - part(predicted, o.active)).repeat(n_embd, n, o.n_streams, 1)
        return innovation * coefficients + predicted


@dataclass
class Laurel:
    down: Linear = gguf("laurel_l", dims="embd laurel")
    up: Linear = gguf("laurel_r", dims="laurel embd")
    norm: RMSNorm = gguf("laurel_post_norm", dims="embd")

    def __call__(self, x: Tensor, eps: float) -> Tensor:
        """X [n_embd, n] to [n_embd, n]."""
        return self.norm(self.up(self.down(x)), eps) + x


@dataclass
class Keys:
    key: Linear = gguf("attn_k", dims="embd k")
    key_norm: RMSNorm = gguf("attn_k_norm", dims="head")
    value: Linear = gguf("attn_v", dims="embd v")

    def __call__(self, x: Tensor, step: Step, o: Options) -> tuple[Tensor, Tensor]:
        n_kv_heads, n = o.n_kv_heads[step.layer], x.shape[1]
        key = self.key_norm(self.key(x).reshape(o.head_dim, n_kv_heads, n), o.eps)
        value = self.value(x).reshape(o.head_dim_v, n_kv_heads, n).rms_norm(o.eps)
        return step.rotate(key, o.rope_of(step.layer)), value


@dataclass
class Attention:
    """Layers that use others' keys and values may have weights for their own; they stay unused."""

    keys: Keys | None
    query: Linear = gguf("attn_q", dims="embd q")
    query_norm: RMSNorm = gguf("attn_q_norm", dims="head")
    output: Linear = gguf("attn_output", dims="mixed embd")

    def __call__(self, x: Tensor, step: Step, o: Options) -> Tensor:
        donor = o.donors[step.layer]
        query = self.query_norm(self.query(x).reshape(o.head_dim, o.n_heads[step.layer], x.shape[1]), o.eps)
        query = step.rotate(query, o.rope_of(step.layer))
        step.cache.layer(donor)
        key, value = self.keys(x, step, o) if self.keys and donor == step.layer else (None, None)
        return self.output(attention(step.ctx, query, key, value, step.cache, o.scale))


@dataclass
class MLP(GatedMLP):
    def __call__(self, x: Tensor, sparsity: float) -> Tensor:
        """X [n_embd, n] to [n_embd, n]; only gates so many standard deviations above the mean stay."""
        gate, up = linears(x, self.gate, self.up)
        if sparsity:
            n_ff = gate.shape[0]
            mean = gate.sum_rows().scale(1 / n_ff)
            deviation = (gate - mean).square().sum_rows().scale(1 / max(n_ff - 1, 1)).sqrt()
            gate = (gate - (mean + deviation.scale(sparsity))).relu()
        return self.down(up * gate.gelu())


@dataclass
class Layer:
    streams: Streams
    attention: Attention
    laurel: Laurel
    mlp: MLP
    given: PerLayerGate
    attention_norm: RMSNorm = gguf("attn_norm", dims="embd")
    attention_post_norm: RMSNorm = gguf("post_attention_norm", dims="embd")
    mlp_norm: RMSNorm = gguf("ffn_norm", dims="embd")
    mlp_post_norm: RMSNorm = gguf("post_ffw_norm", dims="embd")

    def __call__(self, x: Tensor, step: Step, o: Options) -> Tensor:
        predicted = self.streams.predicted(x, o)
        active = part(predicted, o.active)
        hidden = self.attention_norm(active, o.eps)
        mixed = self.attention_post_norm(self.attention(hidden, step, o), o.eps) + active
        mixed = (mixed + self.laurel(hidden, o.eps)).scale(2**-0.5)
        made = self.mlp_post_norm(self.mlp(self.mlp_norm(mixed, o.eps), o.sparsity[step.layer]), o.eps) + mixed
        corrected = self.streams.corrected(predicted, made, o)
        assert step.per_layer is not None, "enter computes it"
        given = self.given(part(corrected, o.active) * self.streams.scale, part(step.per_layer, step.layer), o.eps)
        first, others = apart(corrected)
        return first.concat(others + given, 2)


def apart(x: Tensor) -> tuple[Tensor, Tensor]:
    """The first stream [n_embd, n, 1] and the others of x [n_embd, n, n_streams]."""
    n_embd, n, n_streams, _ = x.shape
    strides = (x.strides[1], x.strides[2])
    return x.view((n_embd, n, 1), strides, 0), x.view((n_embd, n, n_streams - 1), strides, x.strides[2])


@dataclass
class Weights:
    per_layer: PerLayerInputs
    embedding: Embedding = gguf("token_embd", dims="embd vocab")
    output_norm: RMSNorm = gguf("output_norm", dims="embd")
    output: Linear = gguf("output", alt="token_embd", dims="embd vocab")
    layers: list[Layer] = gguf("blk")
    split: Tensor = gguf("altup_proj.weight", dims="embd embd others", use=Use.MATRIX)
    merge: Tensor = gguf("altup_unembd_proj.weight", dims="embd embd others", use=Use.MATRIX)


class Gemma3n(GemmaDecoder[Options]):
    Options = Options
    Weights = Weights
    nodes_per_layer = 144

    def __init__(self, file: GGUFFile, backend: Backend, n_ctx: int) -> None:
        super().__init__(file, backend, n_ctx)
        check_own_keys(self.options.donors, [layer.attention.keys is not None for layer in self.weights.layers])

    def enter(self, x: Tensor, step: Step) -> Tensor:
        """[n_embd, n, n_streams]: the embedding, and others as long as it is."""
        o = self.options
        step.per_layer = self.weights.per_layer(step.inputs.tokens, x, o.eps)
        n_embd, n = x.shape[:2]
        others = self.weights.split.mul_mat(x.repeat(n_embd, n, o.n_streams - 1, 1))
        return x.concat(others * length(x) / length(others), 2)

    def leave(self, x: Tensor) -> Tensor:
        """The mean of the streams, once they are as long as the first."""
        o = self.options
        first, others = apart(x)
        others = self.weights.merge.mul_mat(others)
        others = others * length(first) / length(others)
        merged = part(x, 0)
        for i in range(o.n_streams - 1):
            merged = merged + part(others, i)
        return merged.scale(1 / o.n_streams)
