"""Queries, keys and values of a layer's input, from three matrices or from one.

The axes ``q``, ``k`` and ``v`` are the widths of all heads together, ``qkv`` is their sum. Both kinds give query
[head_dim, n_heads, n], key [head_dim, n_kv_heads, n] and value [head_dim_v, n_kv_heads, n] for x [n_embd, n]. All may be
views of a common product, in which neighbouring tokens lie apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from puna.ml.tensor import Tensor
from puna.nn.declare import gguf
from puna.nn.layers import Linear, linears


@dataclass
class SeparateQKV:
    joins: ClassVar = ("query", "key", "value")

    query: Linear = gguf("attn_q", dims="embd q")
    key: Linear = gguf("attn_k", dims="embd k")
    value: Linear = gguf("attn_v", dims="embd v")

    def __call__(
        self, x: Tensor, n_heads: int, n_kv_heads: int, head_dim: int, head_dim_v: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = linears(x, self.query, self.key, self.value)
        return (
            query.unflatten(head_dim, n_heads),
            key.unflatten(head_dim, n_kv_heads),
            value.unflatten(head_dim_v or head_dim, n_kv_heads),
        )


@dataclass
class PackedQKV:
    all: Linear = gguf("attn_qkv", dims="embd qkv")

    def __call__(
        self, x: Tensor, n_heads: int, n_kv_heads: int, head_dim: int, head_dim_v: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        y = self.all(x)
        width, n, _, _ = y.shape

        def part(begin: int, heads: int, dim: int) -> Tensor:
            return y.view((dim, heads, n), (4 * dim, 4 * width), 4 * begin)

        key_begin = n_heads * head_dim
        value_begin = key_begin + n_kv_heads * head_dim
        return (
            part(0, n_heads, head_dim),
            part(key_begin, n_kv_heads, head_dim),
            part(value_begin, n_kv_heads, head_dim_v or head_dim),
        )


QKV = SeparateQKV | PackedQKV
