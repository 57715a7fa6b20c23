"""LFM2, dense and with experts: short convolutions between layers that attend."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from puna.errors import UnsupportedModel
from puna.gguf.convert.families.common import (
    FULL,
    KEYS,
    LENGTHS,
    TABLE,
    count,
    mixture,
    n_kv_heads,
    n_layers,
    per_layer,
    rope,
    router,
    used,
)
from puna.gguf.convert.fields import Fields
from puna.gguf.convert.rotation import LINEAR, YARN
from puna.gguf.convert.table import Family, Line, positive, squeezed, whole

_CONV = "conv"


def _kinds_of(fields: Fields) -> list[str]:
    if not fields.has("layer_types"):  # as the first files have it
        attending = fields.items("full_attn_idxs", default=list(range(n_layers(fields))))
        return [FULL if i in attending else _CONV for i in range(n_layers(fields))]
    kinds = per_layer(fields, "layer_types", [])
    if unknown := set(kinds) - {_CONV, FULL}:
        raise UnsupportedModel(f"{fields.file}: layer_types has {sorted(unknown)[0][:60]!r}, which cannot be converted")
    return kinds


def _kinds(fields: Fields, layer: int) -> Set[str]:
    return {_kinds_of(fields)[layer], "dense"}


def _width(fields: Fields) -> int:
    """Of the MLPs: two thirds of what is stated, up to a multiple, where the model adjusts it."""
    found = fields.whole("block_ff_dim", "intermediate_size", high=1 << 24)
    if not fields.flag("block_auto_adjust_ff_dim", default=True):
        return found
    found = int(2 * found / 3)
    if fields.has("block_ffn_dim_multiplier"):
        found = int(fields.positive("block_ffn_dim_multiplier") * found)
    multiple = fields.whole("block_multiple_of", default=256, high=1 << 20)
    return -(-found // multiple) * multiple


_WIDTH_OF_CONV = whole("conv_L_cache", default=3, low=2, high=64)


def _mlp(on: str) -> tuple[Line, ...]:
    return (
        Line("ffn_gate", "feed_forward.w1", "ff embd", on=on),
        Line("ffn_up", "feed_forward.w3", "ff embd", on=on),
        Line("ffn_down", "feed_forward.w2", "embd ff", on=on),
    )


_MIXERS = (
    Line("attn_norm", "operator_norm", "embd"),
    Line("ffn_norm", "ffn_norm", "embd"),
    Line("attn_q", "self_attn.q_proj", "q embd", on=FULL),
    Line("attn_k", "self_attn.k_proj", "k embd", on=FULL),
    Line("attn_v", "self_attn.v_proj", "v embd", on=FULL),
    Line("attn_output", "self_attn.out_proj", "embd mixed", on=FULL),
    Line("attn_q_norm", "self_attn.q_layernorm", "head", on=FULL),
    Line("attn_k_norm", "self_attn.k_layernorm", "head", on=FULL),
    Line("shortconv.conv", "conv.conv", "embd 1 conv", squeezed, "embd conv", on=_CONV, exact=True),
    Line("shortconv.in_proj", "conv.in_proj", "3*embd embd", on=_CONV),
    Line("shortconv.out_proj", "conv.out_proj", "embd embd", on=_CONV),
)

LFM2 = Family(
    architecture="lfm2",
    layer=(*_MIXERS, *_mlp("dense")),
    ends=(TABLE, Line("token_embd_norm", "embedding_norm", "embd")),
    keys={
        **KEYS,
        "feed_forward_length": _width,
        "attention.layer_norm_rms_epsilon": positive("norm_eps", "block_norm_eps", default=1e-5),
        "attention.head_count_kv": lambda fields: [n_kv_heads(fields) if kind == FULL else 0 for kind in _kinds_of(fields)],
        "shortconv.l_cache": _WIDTH_OF_CONV,
    },
    lengths={**LENGTHS, "ff": _width, "conv": _WIDTH_OF_CONV},
    defaults={"tie_word_embeddings": True, "rope_theta": 1e6},
    expects={"tie_word_embeddings": (True,), "tie_embedding": (True,), "conv_bias": (False,)},
    rope=rope(LINEAR, YARN),
    kinds=_kinds,
)

_WIDTH = whole("moe_intermediate_size", high=1 << 24)
_KEYS, _LENGTHS = mixture(count("num_experts"), used("num_experts_per_tok"), _WIDTH)


def _n_dense(fields: Fields) -> int:
    return fields.whole("num_dense_layers", default=2, low=0, high=n_layers(fields))


LFM2MOE = replace(
    LFM2,
    architecture="lfm2moe",
    layer=(
        *_MIXERS,
        *_mlp("dense"),
        router("feed_forward.gate", on="experts"),
        Line("exp_probs_b.bias", "feed_forward.expert_bias", "experts", on="experts", whole=True),
        Line("ffn_gate_exps", "feed_forward.experts.{e}.w1", "ff_expert embd", on="experts"),
        Line("ffn_up_exps", "feed_forward.experts.{e}.w3", "ff_expert embd", on="experts"),
        Line("ffn_down_exps", "feed_forward.experts.{e}.w2", "embd ff_expert", on="experts"),
    ),
    keys={
        **LFM2.keys,
        **_KEYS,
        "feed_forward_length": whole("intermediate_size", high=1 << 24),
        "leading_dense_block_count": _n_dense,
        "expert_gating_func": lambda fields: 2,  # sigmoids
    },
    lengths={**LFM2.lengths, **_LENGTHS, "ff": whole("intermediate_size", high=1 << 24)},
    expects={**LFM2.expects, "norm_topk_prob": (True,), "routed_scaling_factor": (1.0, 1), "use_expert_bias": (True,)},
    kinds=lambda fields, layer: {_kinds_of(fields)[layer], "dense" if layer < _n_dense(fields) else "experts"},
)
