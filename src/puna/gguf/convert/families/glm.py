"""GLM-4 0414 and Z1 (glm4), GLM-4.5, 4.6 and Air (glm4moe)."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from puna.gguf.convert.families.common import (
    ENDS,
    HEAD_NORMS,
    KEYS,
    LENGTHS,
    MIXED,
    NORMS,
    QKV,
    SILU,
    count,
    experts,
    mixture,
    n_layers,
    rope,
    router,
    swiglu,
    used,
)
from puna.gguf.convert.fields import Fields
from puna.gguf.convert.rotation import LINEAR, YARN
from puna.gguf.convert.table import Family, Line, Value, perhaps_positive, whole

GLM4 = Family(
    architecture="glm4",
    layer=(
        Line("attn_norm", "input_layernorm", "embd"),
        Line("post_attention_norm", "post_self_attn_layernorm", "embd"),
        Line("ffn_norm", "post_attention_layernorm", "embd"),
        Line("post_ffw_norm", "post_mlp_layernorm", "embd"),
        *QKV,
        replace(MIXED, biased=None),
        Line("ffn_up", "mlp.gate_up_proj", "2*ff embd"),
        Line("ffn_down", "mlp.down_proj", "embd ff"),
    ),
    ends=ENDS,
    keys=KEYS,
    lengths=LENGTHS,
    defaults={"partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07},
    expects=SILU,
    rope=rope(LINEAR),
)

_WIDTH = whole("moe_intermediate_size", high=1 << 24)
_KEYS, _LENGTHS = mixture(count("n_routed_experts"), used("num_experts_per_tok"), _WIDTH)


def _has_norms(fields: Fields) -> bool:
    return fields.flag("use_qk_norm", default=False)


def _n_dense(fields: Fields) -> int:
    return fields.whole("first_k_dense_replace", default=1, low=0, high=n_layers(fields))


def n_shared(fields: Fields) -> int:
    return fields.whole("n_shared_experts", default=1, low=0, high=1 << 12)


def _kinds(fields: Fields, layer: int) -> Set[str]:
    if layer < _n_dense(fields):
        return {"dense"}
    return {"experts", "shared"} if n_shared(fields) else {"experts"}


SIGMOID = 2  # of expert_gating_func

SIGMOIDS: dict[str, Value] = {
    "expert_shared_count": n_shared,
    "expert_gating_func": lambda fields: SIGMOID,
    "expert_weights_norm": lambda fields: fields.flag("norm_topk_prob", default=True),
    "expert_weights_scale": perhaps_positive("routed_scaling_factor"),
    "expert_group_count": whole("n_group", default=1, high=1 << 12),
    "expert_group_used_count": whole("topk_group", default=1, high=1 << 12),
}
MIXTURE = (
    router("mlp.gate", on="experts"),
    Line("exp_probs_b.bias", "mlp.gate.e_score_correction_bias", "experts", on="experts", whole=True),
    *experts(on="experts"),
    *swiglu("mlp.shared_experts.{}_proj", on="shared", suffix="_shexp", width="ff_shared"),
)

GLM4MOE = Family(
    architecture="glm4moe",
    layer=(
        NORMS[0],
        Line("post_attention_norm", "post_attention_layernorm", "embd"),
        *QKV,
        replace(MIXED, biased=None),
        *(Line(line.ours, line.theirs, line.dims, when=_has_norms) for line in HEAD_NORMS),
        *swiglu(on="dense"),
        *MIXTURE,
    ),
    ends=ENDS,
    keys={**KEYS, **_KEYS, **SIGMOIDS, "leading_dense_block_count": _n_dense},
    lengths={**LENGTHS, **_LENGTHS, "ff_shared": lambda fields: n_shared(fields) * _WIDTH(fields)},
    defaults={"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5},
    expects=SILU,
    rope=rope(LINEAR, YARN),
    kinds=_kinds,
    # Layers behind the last guess further tokens.
    beyond=True,
)
