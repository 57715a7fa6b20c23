"""DeepSeek V2, V3 and R1, Kimi K2's shape, and GLM-4.7-Flash: attention through latents.

The matrix that expands a latent is cut in two, the form in which the cache holds one latent for all heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

from puna.errors import UnsupportedModel
from puna.gguf.convert.families.common import (
    ENDS,
    EPS,
    LENGTHS,
    NORMS,
    SILU,
    SIZES,
    count,
    every,
    experts,
    mixture,
    n_heads,
    n_layers,
    per_layer,
    router,
    swiglu,
    used,
)
from puna.gguf.convert.families.glm import MIXTURE, SIGMOIDS, n_shared
from puna.gguf.convert.fields import Fields
from puna.gguf.convert.rotation import LINEAR, YARN, Rotation
from puna.gguf.convert.table import Change, Family, Lengths, Line, Rows, Value, whole

_own, _turning, _value = (whole(name, high=1 << 16) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
_rank = whole("kv_lora_rank", high=1 << 20)


def _q_rank(fields: Fields) -> int:
    """0: queries come from the hidden state."""
    return fields.whole("q_lora_rank", default=0, low=0, high=1 << 20)


def _heads_of(own: bool) -> Change:
    """What expands a latent to each head's keys, turned so that queries go through it, or to its values."""

    def cut(rows: Rows, lengths: Lengths) -> Rows:
        each = rows.reshape(lengths["heads"], lengths["own"] + lengths["value"], lengths["kv_rank"])
        return each[:, : lengths["own"]].swapaxes(1, 2) if own else each[:, lengths["own"] :]

    return cut


def _rope(fields: Fields) -> dict[str, Any]:
    """Where positions are stretched, scores grow by the square of what mscale_all_dim says."""
    rotation = Rotation(Fields({**fields.values, "partial_rotary_factor": 1.0}), _turning(fields), (LINEAR, YARN))
    if rotation.kind != YARN:
        return rotation.keys()
    options = rotation.options
    one, all_dim = (options.number(name, default=0.0) for name in ("mscale", "mscale_all_dim"))
    if options.has("attention_factor") or one != all_dim:
        raise UnsupportedModel(f"{fields.file}: YaRN with a magnitude of its own cannot be converted for deepseek2")
    found = {"rope.freq_base": rotation.base, "rope.dimension_count": rotation.n_dims, **rotation.yarn()}
    return found | {"rope.scaling.yarn_log_multiplier": 0.1 * all_dim}


def _n_dense(fields: Fields) -> int:
    return fields.whole("first_k_dense_replace", default=1, low=0, high=n_layers(fields))


def _kinds(fields: Fields, layer: int) -> Set[str]:
    found = {"low" if _q_rank(fields) else "direct"}
    if layer < _n_dense(fields):
        return found | {"dense"}
    return found | {"experts", "shared"} if n_shared(fields) else found | {"experts"}


def _check(fields: Fields) -> None:
    if fields.whole("moe_layer_freq", default=1) != 1:
        raise UnsupportedModel(f"{fields.file}: only models with experts in every layer behind the dense ones can be converted")


_ATTENTION = (
    Line("attn_q", "self_attn.q_proj", "q embd", on="direct"),
    Line("attn_q_a", "self_attn.q_a_proj", "q_rank embd", on="low"),
    Line("attn_q_a_norm", "self_attn.q_a_layernorm", "q_rank", on="low"),
    Line("attn_q_b", "self_attn.q_b_proj", "q q_rank", on="low"),
    Line("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa", "latent embd"),
    Line("attn_kv_a_norm", "self_attn.kv_a_layernorm", "kv_rank"),
    Line("attn_k_b", "self_attn.kv_b_proj", "expanded kv_rank", _heads_of(True), "heads kv_rank own"),
    Line("attn_v_b", "self_attn.kv_b_proj", "expanded kv_rank", _heads_of(False), "heads value kv_rank"),
    Line("attn_output", "self_attn.o_proj", "embd mixed"),
)

_WIDTH = whole("moe_intermediate_size", high=1 << 24)
_KEYS, _LENGTHS = mixture(count("n_routed_experts"), used("num_experts_per_tok"), _WIDTH)

_LATENT_LENGTHS: Mapping[str, Value] = {
    "embd": LENGTHS["embd"],
    "ff": LENGTHS["ff"],
    "heads": n_heads,
    "own": _own,
    "value": _value,
    "kv_rank": _rank,
    "q_rank": _q_rank,
    "q": lambda fields: n_heads(fields) * (_own(fields) + _turning(fields)),
    "latent": lambda fields: _rank(fields) + _turning(fields),
    "expanded": lambda fields: n_heads(fields) * (_own(fields) + _value(fields)),
    "mixed": lambda fields: n_heads(fields) * _value(fields),
    "ff_shared": lambda fields: n_shared(fields) * _WIDTH(fields),
    **_LENGTHS,
}

DEEPSEEK3 = Family(
    architecture="deepseek2",
    layer=(*NORMS, *_ATTENTION, *swiglu(on="dense"), *MIXTURE),
    ends=ENDS,
    keys={
        **SIZES,
        **EPS,
        **_KEYS,
        **SIGMOIDS,
        "attention.head_count": n_heads,
        "attention.head_count_kv": lambda fields: 1,
        "attention.key_length": lambda fields: _rank(fields) + _turning(fields),
        "attention.value_length": _rank,
        "attention.key_length_mla": lambda fields: _own(fields) + _turning(fields),
        "attention.value_length_mla": _value,
        "attention.q_lora_rank": _q_rank,
        "attention.kv_lora_rank": _rank,
        "leading_dense_block_count": _n_dense,
    },
    lengths=_LATENT_LENGTHS,
    expects=SILU
    | {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "rope_interleave": (True,), "attention_bias": (False,)},
    rope=_rope,
    check=_check,
    kinds=_kinds,
    beyond=True,
)


def _grouped(name: str) -> Value:
    """The second generation takes the best groups by their best expert, which GGUF does not have, or none."""

    def value(fields: Fields) -> int:
        if fields.text("topk_method", default="greedy") != "greedy" and fields.whole("topk_group", default=1) != fields.whole(
            "n_group", default=1
        ):
            raise UnsupportedModel(
                f"{fields.file}: topk_method is {fields.text('topk_method')[:40]!r}, only greedy can be converted"
            )
        return 1

    return value


DEEPSEEK2 = replace(
    DEEPSEEK3,
    layer=(
        *NORMS,
        *_ATTENTION,
        *swiglu(on="dense"),
        router("mlp.gate", on="experts"),
        *experts(on="experts"),
        *swiglu("mlp.shared_experts.{}_proj", on="shared", suffix="_shexp", width="ff_shared"),
    ),
    keys={
        **DEEPSEEK3.keys,
        "expert_gating_func": lambda fields: 1,  # softmax
        "expert_weights_norm": lambda fields: fields.flag("norm_topk_prob", default=False),
        "expert_group_count": _grouped("n_group"),
        "expert_group_used_count": _grouped("topk_group"),
    },
    expects=SILU | {"scoring_func": ("softmax",), "attention_bias": (False,), "norm_topk_prob": (False,)},
)


def _lite_kinds(fields: Fields, layer: int) -> Set[str]:
    kinds = per_layer(fields, "mlp_layer_types", every(fields, 1, "sparse", "sparse")) if fields.has("mlp_layer_types") else None
    if kinds is None:
        return _kinds(fields, layer)
    return (_kinds(fields, layer) - {"dense", "experts", "shared"}) | (
        {"dense"} if kinds[layer] == "dense" else {"experts", "shared"}
    )


def _lite_dense(fields: Fields) -> int:
    if not fields.has("mlp_layer_types"):
        return _n_dense(fields)
    kinds = per_layer(fields, "mlp_layer_types", [])
    n_dense = kinds.count("dense")
    if kinds != ["dense"] * n_dense + ["sparse"] * (len(kinds) - n_dense):
        raise UnsupportedModel(f"{fields.file}: mlp_layer_types has dense layers behind others, which cannot be converted")
    return n_dense


GLM4MOELITE = replace(
    DEEPSEEK3,
    keys={**DEEPSEEK3.keys, "leading_dense_block_count": _lite_dense},
    kinds=_lite_kinds,
    defaults={"rope_interleave": True},
)
