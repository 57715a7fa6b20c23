"""Gated delta net (Yang et al. 2024): linear attention whose memory forgets by a gate and corrects itself by the delta rule.

A head's memory S maps keys to values. Each token first fades it, then replaces what it holds for the token's key by the
token's value as far as beta says: ``S = exp(decay) S``, ``S += beta (value - S key) key'``; the output is ``S query``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from puna.kvcache.cache import Cache
from puna.kvcache.recurrent import StateGroup
from puna.ml.backend import Context, Use
from puna.ml.tensor import Tensor
from puna.nn.declare import gguf
from puna.nn.layers import Linear, RMSNorm
from puna.nn.recurrent import CausalConv, over_groups


@dataclass(frozen=True)
class DeltaNetShape:
    n_heads: int  # of values; each has a memory of dim * dim values
    n_key_heads: int  # of queries and keys, shared by equally many heads of values
    dim: int  # of all heads
    conv: int  # tokens that the convolution sees
    is_interleaved: bool  # heads that share a key stand together; else head i has the key i modulo n_key_heads

    @property
    def channels(self) -> int:
        """Of queries, keys and values together."""
        return (2 * self.n_key_heads + self.n_heads) * self.dim

    @property
    def states(self) -> Mapping[str, int]:
        return {"conv": (self.conv - 1) * self.channels, "memory": self.dim * self.dim * self.n_heads}

    @property
    def dims(self) -> dict[str, int]:
        values = self.n_heads * self.dim
        axes = {"conv": self.conv, "mixed_qkv": self.channels, "mixed_qkvz": self.channels + values, "values": values}
        return {**axes, "value_heads": self.n_heads, "value": self.dim}


@dataclass
class SeparateQKVZ:
    """Z is what the output is gated with."""

    qkv: Linear = gguf("attn_qkv", dims="embd mixed_qkv")
    z: Linear = gguf("attn_gate", dims="embd values")

    def __call__(self, x: Tensor, shape: DeltaNetShape) -> tuple[Tensor, Tensor]:
        """X [n_embd, n] to queries, keys and values [channels, n], and z [dim * n_heads, n]."""
        return self.qkv(x), self.z(x)


@dataclass
class PackedQKVZ:
    """One matrix; its rows are ordered by key head, and for each of these query, key, values and z."""

    all: Linear = gguf("ssm_in", dims="embd mixed_qkvz")

    def __call__(self, x: Tensor, shape: DeltaNetShape) -> tuple[Tensor, Tensor]:
        y = self.all(x)
        width, n, _, _ = y.shape
        dim, n_keys = shape.dim, shape.n_key_heads
        values = dim * shape.n_heads // n_keys

        def part(begin: int, size: int) -> Tensor:
            view = y.view((size, n_keys, n), (4 * width // n_keys, 4 * width), 4 * begin)
            return view.contiguous().reshape(size * n_keys, n)

        query, key, value = part(0, dim), part(dim, dim), part(2 * dim, values)
        return query.concat(key, 0).concat(value, 0), part(2 * dim + values, values)


@dataclass
class SeparateBetaAlpha:
    beta: Linear = gguf("ssm_beta", dims="embd value_heads")
    alpha: Linear = gguf("ssm_alpha", dims="embd value_heads")

    def __call__(self, x: Tensor, shape: DeltaNetShape) -> tuple[Tensor, Tensor]:
        """X [n_embd, n] to what becomes beta and the decay, [n_heads, n] each."""
        return self.beta(x), self.alpha(x)


@dataclass
class PackedBetaAlpha:
    """One matrix; its rows are ordered by key head, and for each of these the betas, then the alphas."""

    both: Linear = gguf("ssm_ba", dims="embd 2*value_heads")

    def __call__(self, x: Tensor, shape: DeltaNetShape) -> tuple[Tensor, Tensor]:
        y = self.both(x)
        width, n, _, _ = y.shape
        each = shape.n_heads // shape.n_key_heads

        def part(begin: int) -> Tensor:
            view = y.view((each, shape.n_key_heads, n), (8 * each, 4 * width), 4 * begin)
            return view.contiguous().reshape(shape.n_heads, n)

        return part(0), part(each)


@dataclass
class GatedDeltaNet:
    """States ``conv``, (conv - 1) * channels values, and ``memory``, dim * dim of each head."""

    qkvz: SeparateQKVZ | PackedQKVZ
    beta_alpha: SeparateBetaAlpha | PackedBetaAlpha
    conv: CausalConv = gguf("ssm_conv1d", dims="conv mixed_qkv")
    decay: Tensor = gguf("ssm_a", dims="value_heads", use=Use.VECTOR)  # below 0
    alpha_bias: Tensor = gguf("ssm_dt.bias", alt="ssm_dt", dims="value_heads", use=Use.VECTOR)
    norm: RMSNorm = gguf("ssm_norm", dims="value")
    output: Linear = gguf("ssm_out", dims="values embd")

    def __call__(self, x: Tensor, ctx: Context, cache: Cache, shape: DeltaNetShape, eps: float) -> Tensor:
        """X [n_embd, n] to [n_embd, n]."""
        qkv, z = self.qkvz(x, shape)
        beta, alpha = self.beta_alpha(x, shape)
        beta, decay = beta.sigmoid(), (alpha + self.alpha_bias).softplus() * self.decay
        for tensor in (qkv, z, beta, decay):
            ctx.forward(tensor)  # keeps the products together, before the groups

        def recall(group: StateGroup) -> Tensor:
            return self._recall(group, group.rows(qkv), group.rows(decay), group.rows(beta), shape, eps)

        values = over_groups(ctx, cache, recall)
        n = x.shape[1]
        each = (shape.dim, shape.n_heads, n)
        gated = self.norm(values.reshape(*each), eps) * z.reshape(*each).silu()
        return self.output(gated.reshape(shape.dim * shape.n_heads, n))

    def _recall(self, group: StateGroup, qkv: Tensor, decay: Tensor, beta: Tensor, shape: DeltaNetShape, eps: float) -> Tensor:
        """A group's rows of all three, [.., n_rows, n_sequences], to [dim * n_heads, n_rows * n_sequences]."""
        dim, n_keys, n_heads = shape.dim, shape.n_key_heads, shape.n_heads
        n, s = group.n_rows, group.n_sequences
        mixed = self.conv(qkv, group).silu()

        def part(begin: int, heads: int) -> Tensor:
            row = 4 * shape.channels
            return mixed.view((dim, heads, n, s), (4 * dim, row, row * n), 4 * dim * begin)

        query, key = (_shared(_unit(part(begin, n_keys), eps), shape) for begin in (0, n_keys))
        memory = group.load("memory").reshape(dim, dim, n_heads, s)
        gates = (1, n_heads, n, s)
        both = memory.gated_delta_net(query, key, part(2 * n_keys, n_heads), decay.reshape(*gates), beta.reshape(*gates))
        width = dim * n_heads
        group.store("memory", both.view((width * dim, s), (4 * width * dim,), 4 * width * n * s))
        return both.view((width, n * s), (4 * width,), 0)


def _unit(x: Tensor, eps: float) -> Tensor:
    """Each vector of axis 0 with the length 1; eps is added to the square of its length."""
    n = x.shape[0]
    return x.rms_norm(eps / n).scale(n**-0.5)


def _shared(x: Tensor, shape: DeltaNetShape) -> Tensor:
    """Queries or keys [dim, n_key_heads, n, s] so that head i of the values goes with head i modulo their number."""
    each = shape.n_heads // shape.n_key_heads
    if not shape.is_interleaved or each == 1:
        return x
    dim, n_keys, n, s = x.shape
    return x.reshape(dim, 1, n_keys, n * s).repeat(dim, each, n_keys, n * s).reshape(dim, shape.n_heads, n, s)
