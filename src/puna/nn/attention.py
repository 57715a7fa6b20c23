"""Attention of a batch over the cache (Vaswani et al. 2017; grouped queries: Ainslie et al. 2023)."""

from __future__ import annotations

from functools import reduce

from puna.kvcache.cache import Attended, Cache
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
    turn, turn_back = ranges[0].key_rotation, ranges[0].value_rotation
    if turn:
        query = turn(query)
    attend = _attend_fused if ctx.has_flash_attention else _attend
    mixed = reduce(lambda a, b: a.concat(b, 1), [attend(query, to, scale, softcap, sinks) for to in ranges])
    if turn_back:
        n_heads, n = query.shape[1:3]
        mixed = turn_back(mixed.reshape(mixed.shape[0] // n_heads, n_heads, n)).flatten()
    return mixed


def _rows_of(query: Tensor, to: Attended) -> Tensor:
    """The queries of a range's rows, [head_dim, n_rows, n_heads, n_sequences]."""
    head_dim, n_heads, _, _ = query.shape
    _, head_bytes, token_bytes, _ = query.strides
    rows = query.view(
        (head_dim, n_heads, to.n_rows, to.n_sequences),
        (head_bytes, token_bytes, to.n_rows * token_bytes),
        to.begin * token_bytes,
    )
    return rows.permute(0, 2, 1, 3)


def _attend_fused(query: Tensor, to: Attended, scale: float, softcap: float, sinks: Tensor | None) -> Tensor:
    mixed = _rows_of(query, to).flash_attention(to.key, to.value, to.mask, scale, softcap, sinks)
    return mixed.reshape(to.value.shape[0] * query.shape[1], to.n_rows * to.n_sequences)


def _attend(query: Tensor, to: Attended, scale: float, softcap: float, sinks: Tensor | None) -> Tensor:
    """Step by step, for devices without the fused operation."""
    scores = to.key.mul_mat(_rows_of(query, to))
    if softcap:
        # The scale is applied before the cap, as in the fused operation, and so not again by the softmax.
        scores, scale = scores.scale(scale / softcap).tanh().scale(softcap), 1.0
    shares = scores.softmax_masked(to.mask, scale, sinks)
    mixed = to.value.permute(1, 0, 2, 3).contiguous().mul_mat(shares).permute(0, 2, 1, 3).contiguous()
    return mixed.reshape(to.value.shape[0] * query.shape[1], to.n_rows * to.n_sequences)
