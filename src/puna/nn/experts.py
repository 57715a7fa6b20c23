"""Mixture of experts (Shazeer et al. 2017): each token goes through the few feed-forward parts that a router picks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from puna.ml.backend import Context, Use
from puna.ml.tensor import Gate, Tensor
from puna.nn.adapter import Adapters, adapted
from puna.nn.declare import gguf
from puna.nn.layers import FeedForwardLinear, Linear, gated

# The sum of weights that others are divided by is at least this, the smallest normal F16 (as in llama.cpp).
_SMALLEST_SUM = 2.0**-14


class Gating(Enum):
    """How the router's scores become probabilities; the numbers are those of ``expert_gating_func``."""

    SOFTMAX = 1  # over all experts
    SIGMOID = 2
    SOFTMAX_OF_CHOSEN = 3  # the best scores win, the softmax is over those alone


@dataclass(frozen=True)
class Routing:
    n_experts: int
    n_used: int
    gating: Gating = Gating.SOFTMAX
    is_normalised: bool = False  # the chosen ones' weights are divided by their sum
    scale: float = 1.0  # on the weights
    ranks_scores: bool = False  # the choice is by the router's scores, which differ where sigmoids are alike
    weighs_inputs: bool = False  # the weights are on what goes into the experts, not on what comes out
    n_groups: int = 1  # experts stand in so many groups of equal size (DeepSeek-AI 2024),
    n_groups_used: int = 1  # of which only the best may be chosen from


# What combines gate and up, [n_ff, n_used, n] each.
Activation = Gate | Callable[[Tensor, Tensor], Tensor]


@dataclass
class ExpertLinear:
    """A matrix of each expert, [n_in, n_out, n_experts]."""

    weight: Tensor = gguf("weight", use=Use.EXPERTS)
    scale: Tensor | None = gguf("scale", dims="experts", use=Use.VECTOR, optional=True)  # a factor for each matrix
    bias: Tensor | None = gguf("bias", use=Use.VECTOR, optional=True, skip=1)
    adapters: Adapters = adapted("weight", Use.EXPERTS)

    @property
    def is_plain(self) -> bool:
        """Whether the product of its matrices is all."""
        return self.scale is None and self.bias is None and not self.adapters

    def __call__(self, x: Tensor, experts: Tensor) -> Tensor:
        """X [n_in, n_used or 1, n], experts I32 [n_used, n]: [n_out, n_used, n]."""
        (y,) = x.expert_products([self.weight], experts)
        return self.finish(y, x, experts)

    def finish(self, y: Tensor, x: Tensor, experts: Tensor) -> Tensor:
        """What follows the product y [n_out, n_used, n] of the matrices with x."""
        if self.scale is not None:
            y = y * _factors_of(self.scale, experts)
        y = self.adapters.experts(y, x, experts)
        return y if self.bias is None else y.add_id(self.bias, experts)


def _factors_of(scale: Tensor, experts: Tensor) -> Tensor:
    """The numbers of scale [n_experts] that belong to experts I32 [n_used, n], as [1, n_used, n]."""
    n_experts, n = scale.shape[0], experts.shape[1]
    return scale.beside(experts).reshape(1, n_experts, 1).repeat(1, n_experts, n, 1).rows(experts)


@dataclass
class SeparateGateUp:
    gate: ExpertLinear = gguf("ffn_gate_exps", dims="embd ff_expert experts")
    up: ExpertLinear = gguf("ffn_up_exps", dims="embd ff_expert experts")

    @property
    def parts(self) -> list[ExpertLinear]:
        return [self.gate, self.up]

    def __call__(self, x: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
        """X [n_embd, n_used or 1, n] to gate and up, [n_ff, n_used, n] each."""
        gate, up = x.expert_products([self.gate.weight, self.up.weight], experts)
        return self.gate.finish(gate, x, experts), self.up.finish(up, x, experts)


@dataclass
class PackedGateUp:
    """Both in one stack of matrices, the gate's rows first."""

    both: ExpertLinear = gguf("ffn_gate_up_exps", dims="embd 2*ff_expert experts")

    @property
    def parts(self) -> list[ExpertLinear]:
        return [self.both]

    def __call__(self, x: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
        y = self.both(x, experts)
        width, n_used, n, _ = y.shape
        shape, strides = (width // 2, n_used, n), (4 * width, 4 * width * n_used)
        return y.view(shape, strides, 0), y.view(shape, strides, 2 * width)


@dataclass
class Experts:
    """Routed, gated experts, without those that all tokens go through."""

    gate_up: SeparateGateUp | PackedGateUp
    router: Linear = gguf("ffn_gate_inp", dims="embd experts")
    down: ExpertLinear = gguf("ffn_down_exps", dims="ff_expert embd experts")
    selection_bias: Tensor | None = gguf("exp_probs_b.bias", dims="experts", use=Use.VECTOR, optional=True)

    def __call__(self, ctx: Context, x: Tensor, routing: Routing, activation: Activation = Gate.SILU) -> Tensor:
        """X [n_embd, n] to [n_embd, n]."""
        experts, weights = choose(ctx, self.router(x), routing, self.selection_bias)
        n_embd, n = x.shape[:2]
        each = x.reshape(n_embd, 1, n)
        if routing.weighs_inputs:
            each = each.repeat(n_embd, routing.n_used, n, 1) * weights
        outputs = self.down(self._gated(each, experts, activation), experts)
        return sum_of_experts(outputs) if routing.weighs_inputs else weighted_sum(outputs, weights)

    def _gated(self, x: Tensor, experts: Tensor, activation: Activation) -> Tensor:
        """X [n_embd, n_used or 1, n] through gate and up, [n_ff, n_used, n]."""
        parts = self.gate_up.parts
        if not isinstance(activation, Gate):
            return activation(*self.gate_up(x, experts))
        if all(part.is_plain for part in parts):
            return x.gated_expert_product([part.weight for part in parts], experts, activation)
        return activation.of(*self.gate_up(x, experts))


@dataclass
class SharedExpert:
    """What every token goes through beside its routed experts: one gated MLP, however many experts it stands for."""

    joins: ClassVar = ("gate", "up")

    gate: FeedForwardLinear = gguf("ffn_gate_shexp", dims="embd ff_shared")
    up: FeedForwardLinear = gguf("ffn_up_shexp", dims="embd ff_shared")
    down: FeedForwardLinear = gguf("ffn_down_shexp", dims="ff_shared embd")

    def __call__(self, x: Tensor) -> Tensor:
        """X [n_embd, n] to [n_embd, n]."""
        return self.down(gated(x, Gate.SILU, self.gate, self.up))


@dataclass
class GatedSharedExpert(SharedExpert):
    """How much of it is added each token decides for itself (Qwen Team 2024)."""

    share: Linear = gguf("ffn_gate_inp_shexp", dims="embd 1")

    def __call__(self, x: Tensor) -> Tensor:
        """X [n_embd, n] to [n_embd, n]."""
        return super().__call__(x) * self.share(x).sigmoid()


def choose(ctx: Context, scores: Tensor, routing: Routing, selection_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The experts of each token, I32 [n_used, n], and their weights, [1, n_used, n]; scores [n_experts, n].

    A selection bias takes part in the choice but not in the weights (DeepSeek-V3).
    """
    n_tokens, n_used = scores.shape[1], routing.n_used
    if routing.gating is Gating.SOFTMAX:
        probabilities = scores.softmax()
    elif routing.gating is Gating.SIGMOID:
        probabilities = scores.sigmoid()
    else:
        probabilities = scores
    ranking = scores if routing.ranks_scores else probabilities
    if selection_bias is not None:
        ranking = ranking + selection_bias
    if routing.n_groups_used < routing.n_groups:
        ranking = _within_best_groups(ranking, routing)
    experts = ranking.top_k(n_used)
    weights = probabilities.reshape(1, routing.n_experts, n_tokens).rows(experts)
    if routing.gating is Gating.SOFTMAX_OF_CHOSEN:
        weights = weights.reshape(n_used, n_tokens).softmax().reshape(1, n_used, n_tokens)
    if routing.is_normalised:
        flat = weights.reshape(n_used, n_tokens)
        weights = (flat / flat.sum_rows().clamp(_SMALLEST_SUM, float("inf"))).reshape(1, n_used, n_tokens)
    if routing.scale not in (0.0, 1.0):
        weights = weights.scale(routing.scale)
    ctx.forward(weights)  # before the experts, so that the library can fuse the router's steps
    return experts, weights


def _within_best_groups(ranking: Tensor, routing: Routing) -> Tensor:
    """Ranking [n_experts, n] with minus infinity outside each token's best groups: those whose two best sum highest."""
    n_groups, n = routing.n_groups, ranking.shape[1]
    size = routing.n_experts // n_groups
    n_best = min(2, size)
    groups = ranking.reshape(size, n_groups, n)
    best = ranking.reshape(1, size, n_groups, n).rows(groups.top_k(n_best))
    scores = best.reshape(n_best, n_groups, n).sum_rows().reshape(n_groups, n)
    chosen = scores.top_k(routing.n_groups_used)
    outside = groups.scale(0.0, -math.inf)
    return outside.set_rows(groups.rows(chosen), chosen).reshape(routing.n_experts, n)


def weighted_sum(outputs: Tensor, weights: Tensor) -> Tensor:
    """Outputs [n_embd, n_used, n], weights [1, n_used, n]: their sum over the experts, [n_embd, n]."""
    return sum_of_experts(outputs * weights)


def sum_of_experts(outputs: Tensor) -> Tensor:
    """[n_embd, n_used, n] to [n_embd, n], by halves: of eight experts' outputs three additions, not seven."""
    n_embd, n_used, n_tokens, _ = outputs.shape
    odd = None
    while n_used > 1:
        half = n_used // 2
        strides = outputs.strides[1:3]
        first, second = (outputs.view((n_embd, half, n_tokens), strides, i * half * strides[0]) for i in (0, 1))
        if n_used % 2:
            last = outputs.view((n_embd, 1, n_tokens), strides, 2 * half * strides[0])
            odd = last if odd is None else odd + last
        outputs, n_used = first + second, half
    outputs = outputs if odd is None else outputs + odd
    return outputs.reshape(n_embd, n_tokens)
