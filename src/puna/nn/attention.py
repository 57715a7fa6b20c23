"""Attention of a batch over the cache (Vaswani et al. 2017; grouped queries: Ainslie et al. 2023)."""

from __future__ import annotations

from puna.kvcache.cache import Cache
from puna.ml.attention import Scoring
from puna.ml.backend import Context
from puna.ml.tensor import Tensor


def attention(
    ctx: Context,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    cache: Cache,
    scale: float,
    *,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Store the batch's keys and values, then let every row attend to its own sequence.

    Shapes: query [head_dim, n_heads, n], key [head_dim, n_kv_heads, n], value [head_dim_v, n_kv_heads, n], sinks
    [n_heads]; the result is [head_dim_v * n_heads, n]. Without key and value, the cache's layer holds the batch's already.
    """
    if key is not None and value is not None:
        for tensor in (query, key, value):
            ctx.forward(tensor)  # keeps the products together, before the cache is written
        cache.put(ctx, key, value)
    ranges = cache.get(ctx)
    turns = ranges[0].key_turn, ranges[0].value_turn
    return ctx.attention(query, ranges, Scoring(scale, softcap, sinks, 0.0, *turns))
