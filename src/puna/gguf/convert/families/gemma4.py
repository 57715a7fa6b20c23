"""What reads of Gemma 4: E2B, E4B, 26B-A4B, 31B.

Layers that see everything have wider heads, may have fewer of keys, and rotate the first pairs only: the others' factors
are beyond all positions. Values may be the keys. In the small models the last layers have no keys of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import numpy as np

from puna.errors import UnsupportedModel
from puna.gguf.convert.families.common import (
    EPS,
    FULL,
    HEAD_NORMS,
    LENGTHS,
    MIXED,
    OUTPUT_NORM,
    SIZES,
    TABLE,
    WINDOW,
    count,
    every,
    n_heads,
    n_layers,
    per_layer,
    router,
    swiglu,
    used,
)
from puna.gguf.convert.fields import Fields
from puna.gguf.convert.table import Family, Lengths, Line, Rows, perhaps_positive, whole

_NEVER = 1e30  # a factor that stops the rotation
_BASES = {WINDOW: 1e4, FULL: 1e6}


def _kinds_of(fields: Fields) -> list[str]:
    kinds = per_layer(fields, "layer_types", every(fields, 6, WINDOW, FULL))
    if unknown := set(kinds) - {WINDOW, FULL}:
        raise UnsupportedModel(f"{fields.file}: layer_types has {sorted(unknown)[0][:60]!r}, which cannot be converted")
    return kinds


def _head(fields: Fields, kind: str) -> int:
    narrow = fields.whole("head_dim", default=256, high=1 << 16)
    return fields.whole("global_head_dim", default=512, high=1 << 16) if kind == FULL else narrow


def _n_kv_heads(fields: Fields, kind: str) -> int:
    found = fields.whole("num_key_value_heads", high=1 << 16)
    if kind == FULL and _keys_are_values(fields):
        found = fields.whole("num_global_key_value_heads", default=found, high=1 << 16)
    if n_heads(fields) % found:
        raise fields.wrong("num_key_value_heads", found, f"which {n_heads(fields)} heads cannot share")
    return found


def _keys_are_values(fields: Fields) -> bool:
    return fields.flag("attention_k_eq_v", default=False)


def _n_given(fields: Fields) -> int:
    return fields.whole("hidden_size_per_layer_input", default=256, low=0)


def _has_given(fields: Fields) -> bool:
    return _n_given(fields) > 0


def _n_sharing(fields: Fields) -> int:
    return fields.whole("num_kv_shared_layers", default=0, low=0, high=n_layers(fields) - 1)


def _is_mixed(fields: Fields) -> bool:
    return fields.flag("enable_moe_block", default=False)


def _only_mixed(value: Any) -> Any:
    return lambda fields: value(fields) if _is_mixed(fields) else None


def _width(fields: Fields, layer: int) -> int:
    is_wide = fields.flag("use_double_wide_mlp", default=False) and layer >= n_layers(fields) - _n_sharing(fields)
    return fields.whole("intermediate_size", high=1 << 24) * (2 if is_wide else 1)


def _kinds(fields: Fields, layer: int) -> Set[str]:
    found = {kind for kind, holds in {"given": _n_given(fields), "mixed": _is_mixed(fields)}.items() if holds}
    if layer < n_layers(fields) - _n_sharing(fields):
        found.add("keys")
        if _kinds_of(fields)[layer] == WINDOW or not _keys_are_values(fields):
            found.add("values")
    return found


def _lengths(fields: Fields, layer: int) -> Lengths:
    kind = _kinds_of(fields)[layer]
    width, n_kv = _head(fields, kind), _n_kv_heads(fields, kind)
    mixed = n_heads(fields) * width
    return {"head": width, "q": mixed, "mixed": mixed, "k": n_kv * width, "v": n_kv * width, "ff": _width(fields, layer)}


def _bases(fields: Fields) -> Mapping[str, Fields]:
    stated = fields.object("rope_parameters")
    return {kind: stated.object(kind) for kind in (WINDOW, FULL)}


def _rope(fields: Fields) -> dict[str, Any]:
    options = _bases(fields)
    for kind, allowed in ((WINDOW, (None, "default")), (FULL, (None, "proportional"))):
        if options[kind].get("rope_type") not in allowed:
            found = str(options[kind].get("rope_type"))[:40]
            raise UnsupportedModel(f"{fields.file}: a rotation of type {found!r} cannot be converted in {kind} layers")
    bases = {kind: options[kind].positive("rope_theta", default=_BASES[kind]) for kind in options}
    return {
        "rope.freq_base": bases[FULL],
        "rope.freq_base_swa": bases[WINDOW],
        "rope.dimension_count": _head(fields, FULL),
        "rope.dimension_count_swa": _head(fields, WINDOW),
    }


def _factors(fields: Fields) -> Mapping[str, Rows]:
    n_pairs = _head(fields, FULL) // 2
    share = _bases(fields)[FULL].positive("partial_rotary_factor", default=0.25)
    turning = int(share * _head(fields, FULL)) // 2
    if not 0 < turning <= n_pairs:
        raise fields.wrong("partial_rotary_factor", share, f"which makes {turning} of {n_pairs} pairs rotate")
    return {"rope_freqs.weight": np.where(np.arange(n_pairs) < turning, 1.0, _NEVER).astype(np.float32)}


_WIDTH = whole("moe_intermediate_size", high=1 << 24)

GEMMA4 = Family(
    architecture="gemma4",
    layer=(
        Line("attn_norm", "input_layernorm", "embd"),
        Line("post_attention_norm", "post_attention_layernorm", "embd"),
        Line("ffn_norm", "pre_feedforward_layernorm", "embd"),
        Line("post_ffw_norm", "post_feedforward_layernorm", "embd"),
        Line("layer_output_scale.weight", "layer_scalar", "1", whole=True),
        Line("attn_q", "self_attn.q_proj", "q embd"),
        Line("attn_k", "self_attn.k_proj", "k embd", on="keys"),
        Line("attn_v", "self_attn.v_proj", "v embd", on="values"),
        MIXED,
        HEAD_NORMS[0],
        Line("attn_k_norm", "self_attn.k_norm", "head", on="keys"),
        *swiglu(),
        Line("inp_gate", "per_layer_input_gate", "given embd", on="given"),
        Line("proj", "per_layer_projection", "embd given", on="given"),
        Line("post_norm", "post_per_layer_input_norm", "embd", on="given"),
        router("router.proj", on="mixed"),
        Line("ffn_gate_inp.scale", "router.scale", "embd", on="mixed", whole=True),
        Line("ffn_down_exps.scale", "router.per_expert_scale", "experts", on="mixed", whole=True),
        Line("ffn_gate_up_exps.weight", "experts.gate_up_proj", "experts 2*ff_expert embd", on="mixed", whole=True),
        Line("ffn_down_exps.weight", "experts.down_proj", "experts embd ff_expert", on="mixed", whole=True),
        Line("post_ffw_norm_1", "post_feedforward_layernorm_1", "embd", on="mixed"),
        Line("post_ffw_norm_2", "post_feedforward_layernorm_2", "embd", on="mixed"),
        Line("pre_ffw_norm_2", "pre_feedforward_layernorm_2", "embd", on="mixed"),
    ),
    ends=(
        TABLE,
        OUTPUT_NORM,
        Line("per_layer_token_embd", "embed_tokens_per_layer", "vocab given_all", when=_has_given),
        Line("per_layer_model_proj", "per_layer_model_projection", "given_all embd", when=_has_given),
        Line("per_layer_proj_norm", "per_layer_projection_norm", "given", when=_has_given),
    ),
    keys={
        **SIZES,
        **EPS,
        "feed_forward_length": lambda fields: [_width(fields, i) for i in range(n_layers(fields))],
        "attention.head_count": n_heads,
        "attention.head_count_kv": lambda fields: [_n_kv_heads(fields, kind) for kind in _kinds_of(fields)],
        "attention.key_length": lambda fields: _head(fields, FULL),
        "attention.value_length": lambda fields: _head(fields, FULL),
        "attention.key_length_swa": lambda fields: _head(fields, WINDOW),
        "attention.value_length_swa": lambda fields: _head(fields, WINDOW),
        "attention.sliding_window": whole("sliding_window"),
        "attention.sliding_window_pattern": lambda fields: [kind == WINDOW for kind in _kinds_of(fields)],
        "attention.shared_kv_layers": _n_sharing,
        "embedding_length_per_layer_input": _n_given,
        "final_logit_softcapping": perhaps_positive("final_logit_softcapping"),
        "expert_count": _only_mixed(count("num_experts")),
        "expert_used_count": _only_mixed(used("top_k_experts")),
        "expert_feed_forward_length": _only_mixed(_WIDTH),
    },
    lengths={
        **{name: LENGTHS[name] for name in ("embd", "heads")},
        "experts": lambda fields: count("num_experts")(fields) if _is_mixed(fields) else 0,
        "ff_expert": lambda fields: _WIDTH(fields) if _is_mixed(fields) else 0,
        "given": _n_given,
        "given_all": lambda fields: _n_given(fields) * n_layers(fields),
    },
    defaults={"tie_word_embeddings": True, "sliding_window": 512, "max_position_embeddings": 131072},
    expects={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "tie_word_embeddings": (True,),
        "attention_bias": (False,),
        "use_bidirectional_attention": ("vision", False),  # which is about images
    },
    rope=_rope,
    made=_factors,
    kinds=_kinds,
    layer_lengths=_lengths,
    unused=(
        r"(model\.)?(vision|audio)_tower\..*",
        r"(model\.)?embed_(vision|audio)\..*",
        # Layers that use others' keys and values may have some of their own.
        r".*\.self_attn\.(k_proj|v_proj|k_norm)\.weight",
    ),
)
