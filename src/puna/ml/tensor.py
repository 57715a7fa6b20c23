"""What model code may do with a tensor.

A tensor is a light handle on a node of a graph. Shapes are in ggml's order: axis 0 is the contiguous one, so a matrix
that maps n_in to n_out values has the shape [n_in, n_out], and a batch of vectors the shape [n_in, n_tokens].
Operations build the graph; nothing is computed until the graph runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from typing import Protocol, Self, TypeVar

T = TypeVar("T", bound="Tensor")


class DType(IntEnum):
    """Types the engine creates tensors of; the numbers are ggml's. Weights may have any type a file can hold."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q8_0 = 8
    I32 = 26
    I64 = 27


class SectionOrder(Enum):
    """Which pairs of a head belong to which axis of M-RoPE."""

    IN_TURN = "in turn"  # the first so many to the first axis, the next to the second … (Wang et al. 2024)
    INTERLEAVED = "interleaved"  # one after another to time, height and width (Qwen Team 2025)
    APART = "apart"  # in turn, and the frequencies of each axis begin anew: of encoders, which turn whole heads


@dataclass(frozen=True)
class Sections:
    """How many pairs of a head turn by a token's position along each of the four axes of M-RoPE."""

    n_pairs: tuple[int, int, int, int]
    order: SectionOrder = SectionOrder.IN_TURN


@dataclass(frozen=True)
class RopeOptions:
    """Rotary position embedding, parameters as ggml's rope takes them (YaRN: Peng et al. 2023)."""

    n_dims: int  # of each head, how many are rotated
    neox: bool = False  # pair dimension i with i + n_dims/2 (NeoX) instead of with its neighbour
    base: float = 10000.0
    scale: float = 1.0  # factor on positions: 1 / (how much the context was stretched)
    original_ctx: int = 0  # context length before stretching; only YaRN uses it
    ext_factor: float = 0.0  # 1 switches YaRN's interpolation on
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    sections: Sections | None = None  # positions are four a token; pairs are NeoX's
    begin: int = 0  # the first dimension that is rotated, without sections

    @property
    def rotation(self) -> RopeOptions:
        """The same without its magnitude, to turn by further positions what was rotated before."""
        magnitude = 1.0 - 0.1 * math.log(self.scale) if self.ext_factor else 1.0  # the library applies it with YaRN
        return replace(self, attn_factor=1.0 / magnitude)


class Gate(Enum):
    """What of a gated part's first half its second half is multiplied with."""

    SILU = "silu"
    GELU = "gelu"  # in the approximation by tanh

    def of(self, gate: T, up: T) -> T:
        return gate.swiglu(up) if self is Gate.SILU else gate.geglu(up)

    def of_halves(self, both: T) -> T:
        """Of both [2 n, ...], the gate first."""
        return both.swiglu() if self is Gate.SILU else both.geglu()


class Tensor(Protocol):
    @property
    def shape(self) -> tuple[int, int, int, int]: ...
    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Bytes between neighbours along each axis."""

    def beside(self, other: Self) -> Self:
        """A weight as part of the graph that *other* is in, for operations that nothing else takes part in."""

    def __add__(self, other: Self) -> Self: ...
    def __mul__(self, other: Self) -> Self:
        """Elementwise product; *other* is repeated along axes where it has length 1."""

    def __sub__(self, other: Self) -> Self: ...
    def __truediv__(self, other: Self) -> Self: ...
    def scale(self, factor: float, bias: float = 0.0) -> Self:
        """Self * factor + bias"""

    def mul_mat(self, x: Self) -> Self:
        """Self [k, p] and x [k, n] give [p, n]: the weight is the receiver."""

    def products(self, weights: Sequence[Self], *, is_precise: bool = False) -> Sequence[Self]:
        """Self [k, n] times each of these weights [k, p]: [p, n] each. How is the backend's choice.

        Several may be one product whose parts are views in which neighbouring columns lie apart. A product that *is_precise*
        is summed in F32 on devices that would sum in F16.
        """

    def gated_product(self, weights: Sequence[Self], gate: Gate) -> Self:
        """The products with two weights, gate and up, or with one that holds the rows of both: gated, [p, n]."""

    def expert_products(self, weights: Sequence[Self], experts: Self) -> Sequence[Self]:
        """Each column through the matrices of its experts, for each of these stacks of weights; shapes as mul_mat_id."""

    def gated_expert_product(self, weights: Sequence[Self], experts: Self, gate: Gate) -> Self:
        """The products with gate and up, or with one stack that holds the rows of both: gated, [p, n_used, n]."""

    def mul_mat_id(self, x: Self, experts: Self) -> Self:
        """Each token's vectors through the matrices of its experts.

        Self [k, p, n_expert], x [k, n_used or 1, n], experts I32 [n_used, n] give [p, n_used, n].
        """

    def add_id(self, bias: Self, experts: Self) -> Self:
        """Self [p, n_used, n] plus the row of bias [p, n_expert] of each one's expert, I32 [n_used, n]."""

    def rows(self, indices: Self) -> Self:
        """Self [k, n], indices I32 [m] give F32 [k, m]; a batch of both: [k, n, b] and [m, b] give [k, m, b]."""

    def set_rows(self, source: Self, indices: Self) -> Self:
        """Write source F32 [k, m] to the rows named by indices [m], I64 or I32, converting; or a batch of both.

        The result is self with them, and must enter the graph.
        """

    def rms_norm(self, eps: float, weight: Self | None = None) -> Self:
        """Each vector over its root mean square; times weight, of a vector's shape."""

    def norm(self, eps: float) -> Self:
        """Each vector less its mean, over its standard deviation."""

    def l2_norm(self, eps: float) -> Self:
        """Each vector over its length, or over eps if it is shorter."""

    def silu(self) -> Self: ...
    def gelu(self) -> Self:
        """In the approximation by tanh."""

    def gelu_erf(self) -> Self: ...
    def gelu_quick(self) -> Self:
        """Self * sigmoid(1.702 * self)"""

    def relu(self) -> Self: ...
    def swiglu(self, up: Self | None = None) -> Self:
        """silu(self) * up; without up, self [2 n, m] holds both halves, the gate first."""

    def geglu(self, up: Self | None = None) -> Self:
        """gelu(self) * up, or of both halves as swiglu."""

    def swiglu_clamped(self, up: Self, alpha: float, limit: float) -> Self:
        """Give g * sigmoid(alpha * g) * (u + 1), with g = min(self, limit) and u = up within ±limit."""

    def tanh(self) -> Self: ...
    def sigmoid(self) -> Self: ...
    def exp(self) -> Self: ...
    def log(self) -> Self: ...
    def floor(self) -> Self: ...
    def softplus(self) -> Self: ...
    def square(self) -> Self: ...
    def sqrt(self) -> Self: ...
    def clamp(self, low: float, high: float) -> Self: ...
    def softmax(self) -> Self:
        """Over axis 0."""

    def sum_rows(self) -> Self:
        """The sum over axis 0, which gets the length 1."""

    def cumsum(self) -> Self:
        """Running sums along axis 0."""

    def top_k(self, k: int) -> Self:
        """Indices I32 [k, n] of the largest values of self [m, n], the largest first."""

    def repeat(self, *shape: int) -> Self:
        """To this shape of four lengths, each a multiple of self's."""

    def rope(self, positions: Self, options: RopeOptions, factors: Self | None = None) -> Self:
        """Self [head_dim, n_heads, n], positions I32 [n], or with sections [4 n], axis after axis; factors F32 [n_dims/2]
        divide the frequencies.
        """

    def ssm_conv(self, kernel: Self) -> Self:
        """Each channel's convolution over time: self [width - 1 + n, channels, s], kernel [width, channels] give
        [channels, n, s].
        """

    def ssm_scan(self, x: Self, dt: Self, a: Self, b: Self, c: Self, slots: Self) -> Self:
        """A selective state space (Mamba-2) over n tokens of s sequences, from the states in these slots.

        Shapes: self [d_state, head_dim, n_heads, n_slots], x [head_dim, n_heads, n, s], dt [n_heads, n, s] before its
        softplus, a [1, n_heads], b and c [d_state, n_groups, n, s], slots I32 [s]. The result is flat: first the outputs
        [head_dim, n_heads, n, s], then the new states [d_state, head_dim, n_heads, s].
        """

    def gated_delta_net(self, query: Self, key: Self, value: Self, decay: Self, beta: Self) -> Self:
        """The gated delta rule over n tokens of s sequences.

        Shapes: self, the states, [dim, dim, n_heads, s]; query and key [dim, n_key_heads, n, s], where head i of the
        values goes with i modulo n_key_heads; value [dim, n_heads, n, s]; decay, in logarithms, and beta
        [1, n_heads, n, s]. The result is flat: first the outputs [dim, n_heads, n, s], then the new states.
        """

    def reshape(self, *shape: int) -> Self:
        """Needs a contiguous tensor."""

    def unflatten(self, a: int, b: int) -> Self:
        """[a * b, n] as [a, b, n]; the n columns may lie apart."""

    def flatten(self) -> Self:
        """[a, b, n] as [a * b, n]; the n columns may lie apart."""

    def permute(self, a: int, b: int, c: int, d: int) -> Self:
        """Source axis i goes to the position given at i."""

    def contiguous(self) -> Self: ...
    def cast(self, dtype: DType) -> Self: ...
    def view(self, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Self:
        """Part of the same memory; strides (of axes 1 and up) and offset in bytes."""

    def pad(self, a: int, b: int = 0, c: int = 0, d: int = 0) -> Self:
        """So many zeros more at the end of each axis."""

    def copy_to(self, target: Self) -> Self:
        """Copy into target, converting; the result must enter the graph."""

    def concat(self, other: Self, axis: int) -> Self: ...
