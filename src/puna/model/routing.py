"""Mixtures of experts as GGUF files state them."""

from __future__ import annotations

import math
from collections.abc import Callable

from puna.errors import FileFormatError
from puna.gguf.reader import GGUFFile
from puna.ml.backend import Context
from puna.ml.tensor import Tensor
from puna.nn.experts import Experts, Gating, Routing


def needed_routing(
    file: GGUFFile, *, is_normalised: bool | None = None, gating: Gating = Gating.SOFTMAX, gating_is_stated: bool = False
) -> Routing:
    """As routing_of, for families whose layers all have experts.

    Errors: FileFormatError also for a file that states none.
    """
    routing = routing_of(file, is_normalised=is_normalised, gating=gating, gating_is_stated=gating_is_stated)
    if routing is None:
        raise FileFormatError(f"{file.path}: {file.metadata.full_key('expert_count')} is missing")
    return routing


def routing_of(
    file: GGUFFile, *, is_normalised: bool | None = None, gating: Gating = Gating.SOFTMAX, gating_is_stated: bool = False
) -> Routing | None:
    """Read ``expert_*``. *gating* is the family's, unless *gating_is_stated* and the file does. None: no experts.

    Whether the weights are normalised most families know themselves, and leave them unscaled. *is_normalised* None: the file
    says so, ``expert_weights_norm`` and ``expert_weights_scale``.

    Errors: FileFormatError for numbers that no router can use.
    """
    meta = file.metadata
    n_experts, n_used = meta.integer("expert_count", 0), meta.integer("expert_used_count", 0)
    if not n_experts:
        if any(name.endswith("_exps.weight") for name in file.tensors):
            raise FileFormatError(f"{file.path}: there are experts, but {file.architecture}.expert_count does not say how many")
        return None
    if not 1 <= n_used <= n_experts <= 4096:
        raise FileFormatError(f"{file.path}: {n_used} of {n_experts} experts cannot be used")
    scale = meta.number("expert_weights_scale", 1.0) if is_normalised is None else 1.0
    n_groups, n_groups_used = meta.integer("expert_group_count", 0) or 1, meta.integer("expert_group_used_count", 0) or 1
    if not 1 <= n_groups_used <= n_groups or n_experts % n_groups or n_experts // n_groups * n_groups_used < n_used:
        raise FileFormatError(f"{file.path}: {n_used} of {n_experts} experts from {n_groups_used} of {n_groups} groups")
    stated = meta.integer("expert_gating_func", 0) if gating_is_stated else 0
    try:
        chosen = Gating(stated) if stated else gating
    except ValueError:
        raise FileFormatError(f"{file.path}: expert_gating_func {stated} is not known") from None
    if not math.isfinite(scale):
        raise FileFormatError(f"{file.path}: expert_weights_scale {scale} is not usable")
    return Routing(
        n_experts=n_experts,
        n_used=n_used,
        gating=chosen,
        is_normalised=meta.boolean("expert_weights_norm", False) if is_normalised is None else is_normalised,
        scale=scale,
        n_groups=n_groups,
        n_groups_used=n_groups_used,
    )


def feed_forward(
    ctx: Context,
    x: Tensor,
    mlp: Callable[[Tensor], Tensor] | Experts,
    routing: Routing | None,
    shared: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """X [n_embd, n] through a layer's MLP, or through its experts and the one that all tokens share."""
    if not isinstance(mlp, Experts):
        return mlp(x)
    assert routing is not None, "routing_of refuses a file that has experts and states none"
    routed = mlp(ctx, x, routing)
    return routed if shared is None else routed + shared(x)
