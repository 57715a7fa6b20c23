"""Qwen3-Next, and what reads of Qwen 3.5: gated delta nets between layers that attend.

Norms are stored less one, but for the delta net's own. Qwen 3.5's heads of values stand in GGUF one per key head in turn,
where checkpoints keep those of a key head together.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

import numpy as np

from puna.errors import UnsupportedModel
from puna.gguf.convert.families.common import (
    ENDS,
    FULL,
    KEYS,
    LENGTHS,
    SILU,
    count,
    every,
    everywhere,
    experts,
    head,
    mixture,
    per_layer,
    router,
    swiglu,
    used,
)
from puna.gguf.convert.families.qwen import SHARED, SHARED_WIDTH
from puna.gguf.convert.fields import Fields
from puna.gguf.convert.rotation import LINEAR, YARN, Rotation
from puna.gguf.convert.table import Change, Family, Lengths, Line, Rows, Value, decay, halves, plus_one, squeezed, then, whole

_LINEAR = "linear_attention"


def _kinds_of(fields: Fields) -> list[str]:
    period = fields.whole("full_attention_interval", default=4, high=1024)
    kinds = per_layer(fields, "layer_types", every(fields, period, _LINEAR, FULL))
    if unknown := set(kinds) - {_LINEAR, FULL}:
        raise UnsupportedModel(f"{fields.file}: layer_types has {sorted(unknown)[0][:60]!r}, which cannot be converted")
    return kinds


def _kinds(fields: Fields, layer: int) -> Set[str]:
    return {_kinds_of(fields)[layer]}


_n_values = whole("linear_num_value_heads", default=32, high=1 << 12)
_n_keys = whole("linear_num_key_heads", default=16, high=1 << 12)
_dim = whole("linear_key_head_dim", default=128, high=1 << 12)
_width = whole("linear_conv_kernel_dim", default=4, low=2, high=64)


def _check(fields: Fields) -> None:
    if fields.whole("linear_value_head_dim", default=128) != _dim(fields) or _n_values(fields) % _n_keys(fields):
        raise UnsupportedModel(
            f"{fields.file}: only delta nets with equally wide keys and values, whose keys are shared evenly, can be converted"
        )


def _check_mixed(fields: Fields) -> None:
    _check(fields)
    everywhere(fields, is_normalised=True)


def _rope(fields: Fields) -> dict[str, Any]:
    found = Rotation(fields, head(fields), (LINEAR, YARN)).keys()
    sections = fields.object("rope_parameters", "rope_scaling").get("mrope_section")
    if sections is not None:  # of time, height and width, and a fourth axis that has none
        numbers = Fields({"mrope_section": sections}).numbers("mrope_section", length=3)
        found["rope.dimension_sections"] = [*map(int, numbers), 0]
    return found


def _in_turn(axis: int, *, head: bool = True, only_values: bool = False) -> Change:
    """Heads of values as GGUF has them. *head* says whether they are *dim* values each; *only_values* leaves alone what
    stands before them on the axis: queries and keys.
    """

    def moved(rows: Rows, lengths: Lengths) -> Rows:
        n_keys, n_values, width = lengths["key_heads"], lengths["value_heads"], lengths["value"] if head else 1
        begin = rows.shape[axis] - n_values * width if only_values else 0
        before, values = np.split(rows, [begin], axis)
        apart = (*values.shape[:axis], n_keys, n_values // n_keys, width, *values.shape[axis + 1 :])
        turned = values.reshape(apart).swapaxes(axis, axis + 1).reshape(values.shape)
        return np.concatenate([before, turned], axis)

    return moved


_LENGTHS: Mapping[str, Value] = {
    **LENGTHS,
    "value_heads": _n_values,
    "key_heads": _n_keys,
    "value": _dim,
    "values": lambda fields: _n_values(fields) * _dim(fields),
    "mixed_qkv": lambda fields: (2 * _n_keys(fields) + _n_values(fields)) * _dim(fields),
    "mixed_qkvz": lambda fields: 2 * (_n_keys(fields) + _n_values(fields)) * _dim(fields),
    "conv": _width,
}
_KEYS: Mapping[str, Value] = {
    **KEYS,
    "ssm.conv_kernel": _width,
    "ssm.state_size": _dim,
    "ssm.group_count": _n_keys,
    "ssm.time_step_rank": _n_values,
    "ssm.inner_size": _LENGTHS["values"],
    "attention.recurrent_layers": lambda fields: [kind == _LINEAR for kind in _kinds_of(fields)],
}
_EXPERT_KEYS, _EXPERT_LENGTHS = mixture(
    count("num_experts"), used("num_experts_per_tok"), whole("moe_intermediate_size", high=1 << 24)
)
_EXPERT_KEYS = {**_EXPERT_KEYS, "expert_shared_feed_forward_length": SHARED_WIDTH}
_EXPERT_LENGTHS = {**_EXPERT_LENGTHS, "ff_shared": SHARED_WIDTH}


def _plus_one(ours: str, theirs: str, dims: str = "embd", on: str = "") -> Line:
    return Line(ours, theirs, dims, plus_one, on=on)


_NORMS = (_plus_one("attn_norm", "input_layernorm"), _plus_one("post_attention_norm", "post_attention_layernorm"))
_ATTENTION = (
    Line("attn_q", "self_attn.q_proj", "2*q embd", on=FULL),
    Line("attn_k", "self_attn.k_proj", "k embd", on=FULL),
    Line("attn_v", "self_attn.v_proj", "v embd", on=FULL),
    Line("attn_output", "self_attn.o_proj", "embd mixed", on=FULL),
    _plus_one("attn_q_norm", "self_attn.q_norm", "head", FULL),
    _plus_one("attn_k_norm", "self_attn.k_norm", "head", FULL),
)
_ENDS = (ENDS[0], _plus_one("output_norm", "norm"), ENDS[2])
_NET_NORM = Line("ssm_norm", "linear_attn.norm", "value", on=_LINEAR)
_MIXTURE = (router("mlp.gate"), *experts(), *SHARED)

QWEN3NEXT = Family(
    architecture="qwen3next",
    layer=(
        *_NORMS,
        *_ATTENTION,
        Line("ssm_in", "linear_attn.in_proj_qkvz", "mixed_qkvz embd", on=_LINEAR),
        Line("ssm_ba", "linear_attn.in_proj_ba", "2*value_heads embd", on=_LINEAR),
        Line("ssm_conv1d", "linear_attn.conv1d", "mixed_qkv 1 conv", squeezed, "mixed_qkv conv", on=_LINEAR, exact=True),
        Line("ssm_a", "linear_attn.A_log", "value_heads", decay, on=_LINEAR, whole=True),
        Line("ssm_dt.bias", "linear_attn.dt_bias", "value_heads", on=_LINEAR, whole=True),
        _NET_NORM,
        Line("ssm_out", "linear_attn.out_proj", "embd values", on=_LINEAR),
        *_MIXTURE,
    ),
    ends=_ENDS,
    keys={**_KEYS, **_EXPERT_KEYS},
    lengths={**_LENGTHS, **_EXPERT_LENGTHS},
    defaults={"norm_topk_prob": True, "partial_rotary_factor": 0.25, "head_dim": 256},
    expects=SILU,
    rope=_rope,
    check=_check_mixed,
    kinds=_kinds,
    unused=(r"(model\.)?mtp\..*",),
)

QWEN35 = replace(
    QWEN3NEXT,
    architecture="qwen35",
    layer=(
        *_NORMS,
        *_ATTENTION,
        Line("attn_qkv", "linear_attn.in_proj_qkv", "mixed_qkv embd", _in_turn(0, only_values=True), on=_LINEAR),
        Line("attn_gate", "linear_attn.in_proj_z", "values embd", _in_turn(0), on=_LINEAR),
        Line("ssm_beta", "linear_attn.in_proj_b", "value_heads embd", _in_turn(0, head=False), on=_LINEAR),
        Line("ssm_alpha", "linear_attn.in_proj_a", "value_heads embd", _in_turn(0, head=False), on=_LINEAR),
        Line(
            "ssm_conv1d",
            "linear_attn.conv1d",
            "mixed_qkv 1 conv",
            then(squeezed, _in_turn(0, only_values=True)),
            "mixed_qkv conv",
            on=_LINEAR,
            exact=True,
        ),
        Line("ssm_a", "linear_attn.A_log", "value_heads", then(decay, _in_turn(0, head=False)), on=_LINEAR, whole=True),
        Line("ssm_dt.bias", "linear_attn.dt_bias", "value_heads", _in_turn(0, head=False), on=_LINEAR, whole=True),
        _NET_NORM,
        Line("ssm_out", "linear_attn.out_proj", "embd values", _in_turn(1), on=_LINEAR),
        *swiglu(),
    ),
    keys=_KEYS,
    lengths=_LENGTHS,
    check=_check,
    unused=(r"(model\.)?mtp\..*", r"(model\.)?visual\..*"),
)


def _stacked(line: Line) -> Line:
    """Some checkpoints have the matrices of all experts in one tensor, gate and up of each one after the other."""
    name, both, one = f"{line.ours}.weight", "experts 2*ff_expert embd", "experts ff_expert embd"
    gate, up = (Line(name, "mlp.experts.gate_up_proj", both, halves(1, second=n), one, whole=True) for n in (False, True))
    down = Line(name, "mlp.experts.down_proj", "experts embd ff_expert", whole=True)
    stacks = {"ffn_gate_exps": gate, "ffn_up_exps": up, "ffn_down_exps": down}
    return replace(line, instead=stacks.get(line.ours))


QWEN35MOE = replace(
    QWEN35,
    architecture="qwen35moe",
    layer=(*QWEN35.layer[:-3], *map(_stacked, _MIXTURE)),
    keys={**_KEYS, **_EXPERT_KEYS},
    lengths={**_LENGTHS, **_EXPERT_LENGTHS},
    check=_check_mixed,
)
