"""Attention of a batch over the cache (Vaswani et al. 2017; grouped queries: Ainslie et al. 2023)."""

from __future__ import annotations

from functools import reduce

from puna.kvcache.cache import Attended, Cache
from puna.ml.backend import Context
from puna.ml.tensor import Tensor


def attention(
    ctx: Context,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: Cache,
    scale: float,
    *,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Store the batch's keys and values, then let every row attend to its own sequence.

    Shapes: query [head_dim, n_heads, n], key [head_dim, n_kv_heads, n], value [head_dim_v, n_kv_heads, n], sinks
    [n_heads]; the result is [head_dim_v * n_heads, n].
    """
    for tensor in (query, key, value):
        ctx.forward(tensor)  # keeps the products together, before the cache is written
    cache.put(ctx, key, value)
    parts = [_attend(query, attended, scale, softcap, sinks) for attended in cache.get(ctx)]
    return reduce(lambda a, b: a.concat(b, 1), parts)


def _attend(query: Tensor, to: Attended, scale: float, softcap: float, sinks: Tensor | None) -> Tensor:
    head_dim, n_heads, _, _ = query.shape
    _, head_bytes, token_bytes, _ = query.strides
    rows = query.view(
        (head_dim, n_heads, to.n_rows, to.n_sequences),
        (head_bytes, token_bytes, to.n_rows * token_bytes),
        to.begin * token_bytes,
    )
    mixed = rows.permute(0, 2, 1, 3).flash_attention(to.key, to.value, to.mask, scale, softcap, sinks)
    return mixed.reshape(to.value.shape[0] * n_heads, to.n_rows * to.n_sequences)
