"""Attention as ggml has it, range by range: in one fused operation, or step by step for devices without that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, Protocol

from puna.ml.attention import Scoring
from puna.ml.ggml.tensor import GGMLTensor


class Attended(Protocol):
    """A puna.ml.attention.AttentionRange of this backend's tensors."""

    @property
    def begin(self) -> int: ...
    @property
    def n_rows(self) -> int: ...
    @property
    def n_sequences(self) -> int: ...
    @property
    def key(self) -> Any: ...
    @property
    def value(self) -> Any: ...
    @property
    def mask(self) -> Any: ...


# Takes what is to be done when the graph is closed.
AtClose = Callable[[Callable[[], object]], None]


class Attention(Protocol):
    def __call__(self, query: GGMLTensor, ranges: Sequence[Attended], scoring: Scoring, at_close: AtClose, /) -> GGMLTensor:
        """What puna.ml.backend.Context.attention promises."""


def fused(query: GGMLTensor, ranges: Sequence[Attended], scoring: Scoring, _at_close: AtClose) -> GGMLTensor:
    return joined([_fused(query, to, scoring) for to in ranges])


def stepwise(query: GGMLTensor, ranges: Sequence[Attended], scoring: Scoring, _at_close: AtClose) -> GGMLTensor:
    return joined([_stepwise(query, to, scoring) for to in ranges])


def joined(parts: list[GGMLTensor]) -> GGMLTensor:
    return reduce(lambda a, b: a.concat(b, 1), parts)


def _rows_of(query: GGMLTensor, to: Attended) -> GGMLTensor:
    """The queries of a range's rows, [head_dim, n_rows, n_heads, n_sequences]."""
    head_dim, n_heads, _, _ = query.shape
    _, head_bytes, token_bytes, _ = query.strides
    rows = query.view(
        (head_dim, n_heads, to.n_rows, to.n_sequences),
        (head_bytes, token_bytes, to.n_rows * token_bytes),
        to.begin * token_bytes,
    )
    return rows.permute(0, 2, 1, 3)


def _fused(query: GGMLTensor, to: Attended, how: Scoring) -> GGMLTensor:
    rows = _rows_of(query, to)
    mixed = rows.flash_attention(to.key, to.value, to.mask, how.scale, how.softcap, _own(how.sinks), how.max_bias)
    return mixed.reshape(to.value.shape[0] * query.shape[1], to.n_rows * to.n_sequences)


def _stepwise(query: GGMLTensor, to: Attended, how: Scoring) -> GGMLTensor:
    scores, scale = to.key.mul_mat(_rows_of(query, to)), how.scale
    if how.softcap:
        # The scale is applied before the cap, as in the fused operation, and so not again by the softmax.
        scores, scale = scores.scale(scale / how.softcap).tanh().scale(how.softcap), 1.0
    shares = scores.softmax_masked(to.mask, scale, _own(how.sinks), how.max_bias)
    mixed: GGMLTensor = to.value.permute(1, 0, 2, 3).contiguous().mul_mat(shares).permute(0, 2, 1, 3).contiguous()
    return mixed.reshape(to.value.shape[0] * query.shape[1], to.n_rows * to.n_sequences)


def _own(sinks: Any) -> GGMLTensor | None:
    """A scoring's sinks are this backend's; its type cannot say so."""
    return sinks  # type: ignore[no-any-return]
