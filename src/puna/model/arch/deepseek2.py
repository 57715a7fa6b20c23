"""DeepSeek V2, V2.5, V3 and R1 (DeepSeek-AI 2024), Kimi K2, GLM-4.7-Flash and other models of this shape.

Beside Llama: keys and values of a token come from one short latent vector, and so may queries (multi-head latent
attention); a few dimensions of their own rotate. Experts behind some dense layers, some of them shared; the best groups
may be chosen first.

Files come in two forms. In one the matrix that expands the latents is whole, and the cache holds keys and values of all
heads. In the other it is cut in two: its first part is applied to the queries instead, so that the latent itself is the
key, of one head for all queries, its beginning the value, and the second part is applied to what attention gives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from puna.errors import FileFormatError
from puna.gguf.reader import GGUFFile
from puna.ml.backend import Use
from puna.ml.tensor import Tensor
from puna.model.decoder import Step
from puna.model.prenorm import PreNormDecoder, PreNormLayer, PreNormOptions, PreNormWeights
from puna.model.routing import routing_of
from puna.model.temperature import Temperature
from puna.nn.attention import attention
from puna.nn.declare import gguf
from puna.nn.experts import Experts, Gating
from puna.nn.layers import Linear, RMSNorm
from puna.nn.mlp import SwiGLU

# GLM-4.7-Flash, whose first files do not say that its router has sigmoids: layers and words.
GLM_FLASH_LAYERS, GLM_FLASH_VOCAB = (47, 48), 154880


@dataclass(frozen=True)
class Options(PreNormOptions):
    """head_dim and head_dim_v are those of the cache."""

    q_rank: int = 0  # 0: queries come from the hidden state
    kv_rank: int = 0
    own_dim: int = 0  # of each query head, without what rotates
    value_dim: int = 0  # of each head's mixed values
    temperature: Temperature | None = None

    is_neox: ClassVar[bool] = False
    # The lengths of heads as the model defines them, where the form that cuts the matrix says so apart from the cache's.
    per_head: ClassVar[tuple[str, str]] = ("attention.key_length_mla", "attention.value_length_mla")
    gating: ClassVar[Gating] = Gating.SOFTMAX

    @property
    def is_cut(self) -> bool:
        return self.values_in_keys

    @classmethod
    def read(cls, file: GGUFFile) -> Self:
        o, meta = super().read(file), file.metadata
        key, value = (meta.integer(name, 0) for name in cls.per_head)
        is_cut = bool(key and value)
        n_rope, kv_rank = o.rope.n_dims, meta.integer("attention.kv_lora_rank")
        cached = (kv_rank + n_rope, kv_rank) if is_cut else (o.head_dim, o.head_dim_v)
        key_dim, value_dim = (key, value) if is_cut else cached
        q_rank = meta.integer("attention.q_lora_rank", 0)
        if min(kv_rank, key_dim - n_rope, value_dim) < 1 or q_rank < 0:
            raise FileFormatError(
                f"{file.path}: latents of {q_rank} and {kv_rank} values for heads of {key_dim} and {value_dim}, {n_rope} rotated"
            )
        if not is_cut and o.n_kv_heads != o.n_heads:
            raise FileFormatError(f"{file.path}: {o.n_heads[:8]} heads have no keys of their own: {o.n_kv_heads[:8]}")
        o = replace(
            o,
            n_kv_heads=[1] * o.n_layers if is_cut else o.n_kv_heads,
            head_dim=cached[0],
            head_dim_v=cached[1],
            values_in_keys=is_cut,
            q_rank=q_rank,
            kv_rank=kv_rank,
            own_dim=key_dim - n_rope,
            value_dim=value_dim,
            routing=routing_of(file, gating=_gating(file, o.n_layers, cls.gating), gating_is_stated=True),
            temperature=_temperature(file),
        )
        return o._stretched(file)

    def _stretched(self, file: GGUFFile) -> Self:
        """Where positions are stretched, scores grow by the square of what is called mscale_all_dim, magnitudes do not.

        The key holds a tenth of it. Without it YaRN's own magnitude stands for it, on scores and on rotations.
        """
        multiplier = file.metadata.number("rope.scaling.yarn_log_multiplier", 0.0)
        stretch = -math.log(self.rope.scale)
        magnitude, attn_factor = 1 + 0.1 * stretch, self.rope.attn_factor
        if self.rope.ext_factor and multiplier:
            attn_factor /= magnitude
        growth = attn_factor * magnitude * (1 + multiplier * stretch)
        if not (math.isfinite(growth) and growth > 0):
            raise FileFormatError(f"{file.path}: rope.scaling.yarn_log_multiplier {multiplier} is not usable")
        scale = growth**2 / math.sqrt(self.own_dim + self.rope.n_dims)
        return replace(self, rope=replace(self.rope, attn_factor=attn_factor), scale=scale)

    def dims(self, layer: int) -> dict[str, int]:
        heads, n_rope = self.n_heads[layer], self.rope.n_dims
        # No file of one form has tensors of the other.
        cut, whole = int(self.is_cut), int(not self.is_cut)
        return {
            "heads": heads,
            "q": heads * (self.own_dim + n_rope),
            "q_rank": self.q_rank,
            "kv_rank": self.kv_rank,
            "latent": self.kv_rank + n_rope,
            "own": cut * self.own_dim,
            "value": cut * self.value_dim,
            "expanded": whole * heads * (self.own_dim + self.value_dim),
            "mixed": heads * self.value_dim,
        }


def _gating(file: GGUFFile, n_layers: int, gating: Gating) -> Gating:
    is_glm = n_layers in GLM_FLASH_LAYERS and file.metadata.integer("vocab_size", 0) == GLM_FLASH_VOCAB
    return Gating.SIGMOID if is_glm else gating


def _temperature(file: GGUFFile) -> Temperature | None:
    scale, length = (
        file.metadata.number("attention.temperature_scale", 0.0),
        file.metadata.integer("attention.temperature_length", 0),
    )
    if scale and not (math.isfinite(scale) and length > 0):
        raise FileFormatError(f"{file.path}: attention.temperature_scale {scale} for a length of {length}")
    return Temperature(scale, length) if scale else None


def split(x: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The first n values and the others of each vector [k, a, b], as views."""
    (width, a, b, _), (size, *strides) = x.shape, x.strides
    return x.view((n, a, b), tuple(strides[:2]), 0), x.view((width - n, a, b), tuple(strides[:2]), n * size)


@dataclass
class Query:
    all: Linear = gguf("attn_q", dims="embd q")

    def __call__(self, x: Tensor, o: Options) -> Tensor:
        return self.all(x)


@dataclass
class LowRankQuery:
    down: Linear = gguf("attn_q_a", dims="embd q_rank")
    norm: RMSNorm = gguf("attn_q_a_norm", dims="q_rank")
    up: Linear = gguf("attn_q_b", dims="q_rank q")

    def __call__(self, x: Tensor, o: Options) -> Tensor:
        return self.up(self.norm(self.down(x), o.eps))


@dataclass
class WholeExpansion:
    """Keys and values of each head from the latent."""

    both: Linear = gguf("attn_kv_b", dims="kv_rank expanded")

    def __call__(self, query: Tensor, rotated: Tensor, latent: Tensor, key: Tensor, step: Step, o: Options) -> Tensor:
        """Query [own_dim, n_heads, n] and its rotated part, latent [kv_rank, n], the rotated key [n_rope, 1, n]."""
        n_heads, n = o.n_heads[step.layer], latent.shape[1]
        own, value = split(self.both(latent).reshape(o.own_dim + o.value_dim, n_heads, n), o.own_dim)
        keys = own.concat(key.repeat(o.rope.n_dims, n_heads, n, 1), 0)
        queries = query.concat(rotated, 0)
        if step.temperature is not None:
            queries = queries * step.temperature
        return attention(step.ctx, queries, keys, value.contiguous(), step.cache, o.scale)


@dataclass
class CutExpansion:
    """The latent is key and value of one head; queries come to it, mixed latents go back to each head's values."""

    key: Tensor = gguf("attn_k_b.weight", dims="own kv_rank heads", use=Use.MATRIX)
    value: Tensor = gguf("attn_v_b.weight", dims="kv_rank value heads", use=Use.MATRIX)

    def __call__(self, query: Tensor, rotated: Tensor, latent: Tensor, key: Tensor, step: Step, o: Options) -> Tensor:
        n_heads, n = o.n_heads[step.layer], latent.shape[1]
        moved = self.key.mul_mat(query.permute(0, 2, 1, 3)).permute(0, 2, 1, 3)
        queries = moved.concat(rotated, 0)
        if step.temperature is not None:
            queries = queries * step.temperature
        values = latent.reshape(o.kv_rank, 1, n)
        mixed = attention(step.ctx, queries, values.concat(key, 0), values, step.cache, o.scale)
        each = self.value.mul_mat(mixed.reshape(o.kv_rank, n_heads, n).permute(0, 2, 1, 3))
        return each.permute(0, 2, 1, 3).contiguous().reshape(o.value_dim * n_heads, n)


@dataclass
class Attention:
    query: Query | LowRankQuery
    expansion: WholeExpansion | CutExpansion
    latent: Linear = gguf("attn_kv_a_mqa", dims="embd latent")
    latent_norm: RMSNorm = gguf("attn_kv_a_norm", dims="kv_rank")
    output: Linear = gguf("attn_output", dims="mixed embd")

    def __call__(self, x: Tensor, step: Step, o: Options) -> Tensor:
        n_heads, n, n_rope = o.n_heads[step.layer], x.shape[1], o.rope.n_dims
        own, rotated = split(self.query(x, o).reshape(o.own_dim + n_rope, n_heads, n), o.own_dim)
        latent, key = split(self.latent(x).reshape(o.kv_rank + n_rope, 1, n), o.kv_rank)
        rotated, key = step.rotate(rotated, o.rope), step.rotate(key, o.rope)
        latent = self.latent_norm(latent, o.eps).reshape(o.kv_rank, n)
        return self.output(self.expansion(own, rotated, latent, key, step, o))


@dataclass
class Layer(PreNormLayer):
    attention: Attention  # type: ignore[assignment]  # called alike
    mlp: SwiGLU | Experts


@dataclass
class Weights(PreNormWeights):
    layers: list[Layer] = gguf("blk")


class DeepSeek2(PreNormDecoder[Options]):
    Options = Options
    Weights = Weights
    nodes_per_layer = 64

    def temperature(self, positions: Tensor) -> Tensor | None:
        return self.options.temperature(positions) if self.options.temperature else None

    def shift(self, layer: int, keys: Tensor, changes: Tensor) -> Tensor:
        rope = self.options.rope
        still, turned = split(keys, keys.shape[0] - rope.n_dims)
        return still.concat(turned.rope(changes, rope.rotation, self.factors), 0)


@dataclass(frozen=True)
class LiteOptions(Options):
    """GLM-4.7-Flash in files of the ancestor: the keys' two lengths stand the other way round."""

    per_head: ClassVar[tuple[str, str]] = ("attention.key_length", "attention.value_length")
    gating: ClassVar[Gating] = Gating.SIGMOID


class Glm4MoELite(DeepSeek2):
    Options = LiteOptions
