"""Mamba-2 (Dao & Gu 2024): a state space whose decay and input depend on the token.

Each head keeps d_state values of each of its channels: ``S = exp(dt a) S + dt x b'``; the output is ``S c + d x``. dt, b and
c are made of the token, b and c for several heads together. A gate and a norm follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from puna.kvcache.cache import Cache
from puna.kvcache.recurrent import StateGroup
from puna.ml.backend import Context, Use
from puna.ml.tensor import Tensor
from puna.nn.declare import gguf
from puna.nn.layers import Linear
from puna.nn.recurrent import CausalConv, over_groups


@dataclass(frozen=True)
class MambaShape:
    inner: int  # channels of all heads
    d_state: int
    n_heads: int
    n_groups: int  # heads of a group share b and c
    conv: int  # tokens that the convolution sees

    @property
    def head_dim(self) -> int:
        return self.inner // self.n_heads

    @property
    def channels(self) -> int:
        """Of x, b and c together."""
        return self.inner + 2 * self.n_groups * self.d_state

    @property
    def states(self) -> Mapping[str, int]:
        return {"conv": (self.conv - 1) * self.channels, "space": self.d_state * self.inner}

    @property
    def dims(self) -> dict[str, int]:
        widths = {"ssm_in": self.inner + self.channels + self.n_heads, "ssm_inner": self.inner, "ssm_channels": self.channels}
        groups = {"ssm_group": self.inner // self.n_groups, "ssm_groups": self.n_groups}
        return {"conv": self.conv, "ssm_heads": self.n_heads, **widths, **groups}


@dataclass
class GroupNorm:
    """Each group of channels by its root mean square."""

    weight: Tensor = gguf("weight", use=Use.VECTOR)

    def __call__(self, x: Tensor, eps: float) -> Tensor:
        """X [inner, n] to the same shape."""
        size, n_groups, _, _ = self.weight.shape
        inner, n, _, _ = x.shape
        return (x.reshape(size, n_groups, n).rms_norm(eps) * self.weight).reshape(inner, n)


@dataclass
class Mamba2:
    """States ``conv``, (conv - 1) * channels values, and ``space``, d_state * inner."""

    input: Linear = gguf("ssm_in", dims="embd ssm_in")  # the gate, x, b, c and dt
    conv: CausalConv = gguf("ssm_conv1d", dims="conv ssm_channels")
    dt_bias: Tensor = gguf("ssm_dt.bias", alt="ssm_dt", dims="ssm_heads", use=Use.VECTOR)
    decay: Tensor = gguf("ssm_a", dims="1 ssm_heads", use=Use.OPERAND)  # below 0
    skip: Tensor = gguf("ssm_d", dims="1 ssm_heads", use=Use.VECTOR)
    norm: GroupNorm | None = gguf("ssm_norm", dims="ssm_group ssm_groups", optional=True)
    output: Linear = gguf("ssm_out", dims="ssm_inner embd")

    def __call__(self, x: Tensor, ctx: Context, cache: Cache, shape: MambaShape, eps: float) -> Tensor:
        """X [n_embd, n] to [n_embd, n]."""
        projected = self.input(x)
        ctx.forward(projected)
        y = over_groups(ctx, cache, lambda group: self._scan(group, projected, shape))
        n = x.shape[1]
        gate = projected.view((shape.inner, n), (4 * projected.shape[0],), 0).contiguous()
        y = gate.swiglu(y)
        return self.output(y if self.norm is None else self.norm(y, eps))

    def _scan(self, group: StateGroup, projected: Tensor, shape: MambaShape) -> Tensor:
        """The group's rows of projected [ssm_in, n] to [inner, n_rows * n_sequences]."""
        n, s, inner, d_state = group.n_rows, group.n_sequences, shape.inner, shape.d_state
        mixed = self.conv(group.rows(projected, inner, shape.channels), group).silu()
        row = 4 * shape.channels

        def part(begin: int, width: int, count: int) -> Tensor:
            return mixed.view((width, count, n, s), (4 * width, row, row * n), 4 * begin)

        x = part(0, shape.head_dim, shape.n_heads)
        b, c = (part(inner + i * shape.n_groups * d_state, d_state, shape.n_groups) for i in range(2))
        dt = group.rows(projected, inner + shape.channels, shape.n_heads).contiguous() + self.dt_bias
        pool = group.pool("space")
        spaces = pool.reshape(d_state, shape.head_dim, shape.n_heads, pool.shape[1])
        both = spaces.ssm_scan(x, dt, self.decay, b, c, group.sources)
        group.store("space", both.view((d_state * inner, s), (4 * d_state * inner,), 4 * inner * n * s))
        head = 4 * shape.head_dim
        y = both.view((shape.head_dim, shape.n_heads, n, s), (head, 4 * inner, 4 * inner * n), 0)
        return (y + x * self.skip).reshape(inner, n * s)
