"""What reads of Gemma 3n: E2B and E4B.

Its numbers of streams, of layers with keys of their own and of sparse ones, and the lengths of what each token brings every layer
are llama.cpp's own, which files of this architecture cannot change.
"""

from __future__ import annotations

from collections.abc import Set
from statistics import NormalDist
from typing import Any

import numpy as np

from puna.errors import UnsupportedModel
from puna.gguf.convert.families.common import (
    EPS,
    FULL,
    HEADS,
    LENGTHS,
    MIXED,
    OUTPUT_NORM,
    SIZES,
    TABLE,
    WINDOW,
    every,
    head,
    n_heads,
    n_layers,
    per_layer,
    swiglu,
    windows,
)
from puna.gguf.convert.fields import Fields
from puna.gguf.convert.rotation import Rotation
from puna.gguf.convert.table import Family, Lengths, Line, Rows, whole

_N_OWN_KEYS = 20
_LOCAL_BASE = 10000.0


def _width(fields: Fields) -> int:
    """Of the MLPs, which have one width."""
    stated = fields.get("intermediate_size")
    widths = set(stated) if isinstance(stated, list) else {stated}
    if len(widths) != 1:
        raise UnsupportedModel(f"{fields.file}: intermediate_size differs by layer, which cannot be converted")
    return Fields({"intermediate_size": widths.pop()}).whole("intermediate_size", high=1 << 24)


def _n_sharing(fields: Fields) -> int:
    return fields.whole("num_kv_shared_layers", default=15, low=0, high=n_layers(fields) - 1)


def _sparsity(fields: Fields) -> list[float]:
    """How many standard deviations above the mean a gate must be to stay, by the share of those that do not."""
    n_sparse = 10 if n_layers(fields) > 10 else 0
    usual = [0.95] * n_sparse + [0.0] * (n_layers(fields) - n_sparse)
    stated = fields.get("activation_sparsity_pattern")
    shares = [stated] * n_layers(fields) if isinstance(stated, float) else (stated or usual)
    if len(shares) != n_layers(fields) or not all(isinstance(share, int | float) and 0 <= share < 1 for share in shares):
        raise fields.wrong("activation_sparsity_pattern", stated, f"not {n_layers(fields)} shares below 1")
    return [NormalDist().inv_cdf(share) if share else 0.0 for share in shares]


def _check(fields: Fields) -> None:
    if n_layers(fields) - _n_sharing(fields) != _N_OWN_KEYS:
        raise UnsupportedModel(
            f"{fields.file}: num_kv_shared_layers is {_n_sharing(fields)}; a gemma3n can only be converted with {_N_OWN_KEYS} "
            "layers that have keys of their own"
        )
    per_layer(fields, "layer_types", every(fields, 5, WINDOW, FULL))


def _kinds(fields: Fields, layer: int) -> Set[str]:
    return {"keys" if layer < n_layers(fields) - _n_sharing(fields) else "shared"}


def _rope(fields: Fields) -> dict[str, Any]:
    local = fields.object("rope_parameters").object(WINDOW)
    base = local.number("rope_theta", default=fields.number("rope_local_base_freq", default=_LOCAL_BASE))
    return {**Rotation(fields, head(fields), (), FULL).keys(), "rope.freq_base_swa": base}


def _for_all(rows: Rows, lengths: Lengths) -> Rows:
    """Tokens that only stand for what is seen or heard bring layers what the first token does."""
    missing = lengths["vocab"] - len(rows)
    return np.concatenate([rows, np.repeat(rows[:1], missing, 0)]) if missing else rows


_n_given = whole("hidden_size_per_layer_input", default=256, high=1 << 16)
_n_tokens_given = whole("vocab_size_per_layer_input", default=262144, high=1 << 22)
_KEYS = (("attn_k", "k_proj", "k embd"), ("attn_v", "v_proj", "v embd"), ("attn_k_norm", "k_norm", "head"))

GEMMA3N = Family(
    architecture="gemma3n",
    layer=(
        Line("attn_norm", "input_layernorm", "embd"),
        Line("post_attention_norm", "post_attention_layernorm", "embd"),
        Line("ffn_norm", "pre_feedforward_layernorm", "embd"),
        Line("post_ffw_norm", "post_feedforward_layernorm", "embd"),
        Line("attn_q", "self_attn.q_proj", "q embd"),
        Line("attn_q_norm", "self_attn.q_norm", "head"),
        *(Line(ours, f"self_attn.{theirs}", dims, on="keys") for ours, theirs, dims in _KEYS),
        *(Line(ours, f"self_attn.{theirs}", dims, on="shared", spare=True) for ours, theirs, dims in _KEYS),
        MIXED,
        *swiglu(),
        Line("altup_correct_scale.weight", "altup.correct_output_scale", "embd", whole=True),
        Line("altup_correct_coef", "altup.correction_coefs", "streams streams", exact=True),
        Line("altup_predict_coef", "altup.prediction_coefs", "coefficients streams", exact=True),
        Line("altup_router", "altup.modality_router", "streams embd", exact=True),
        Line("altup_router_norm", "altup.router_norm", "embd"),
        Line("laurel_l", "laurel.linear_left", "rank embd"),
        Line("laurel_r", "laurel.linear_right", "embd rank"),
        Line("laurel_post_norm", "laurel.post_laurel_norm", "embd"),
        Line("inp_gate", "per_layer_input_gate", "given embd"),
        Line("proj", "per_layer_projection", "embd given"),
        Line("post_norm", "post_per_layer_input_norm", "embd"),
    ),
    ends=(
        TABLE,
        OUTPUT_NORM,
        Line("altup_proj", "altup_projections.{e}", "embd embd"),
        Line("altup_unembd_proj", "altup_unembed_projections.{e}", "embd embd"),
        Line("per_layer_token_embd", "embed_tokens_per_layer", "tokens_given given_all", _for_all, "vocab given_all"),
        Line("per_layer_model_proj", "per_layer_model_projection", "given_all embd"),
        Line("per_layer_proj_norm", "per_layer_projection_norm", "given"),
    ),
    keys={
        **SIZES,
        **HEADS,
        **EPS,
        **windows(5),
        "feed_forward_length": _width,
        "attention.shared_kv_layers": _n_sharing,
        "embedding_length_per_layer_input": _n_given,
        "altup.num_inputs": lambda fields: 4,
        "altup.active_idx": lambda fields: 0,
        "activation_sparsity_scale": _sparsity,
    },
    lengths={
        **{name: value for name, value in LENGTHS.items() if name != "ff"},
        "ff": _width,
        "heads": n_heads,
        "streams": lambda fields: 4,
        "coefficients": lambda fields: 16,
        "experts": lambda fields: 3,  # matrices of a stack: of the streams but the first
        "rank": whole("laurel_rank", default=64, high=1 << 16),
        "given": _n_given,
        "given_all": lambda fields: _n_given(fields) * n_layers(fields),
        "tokens_given": _n_tokens_given,
    },
    defaults={"tie_word_embeddings": True, "head_dim": 256, "sliding_window": 512, "rope_theta": 1e6},
    expects={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "tie_word_embeddings": (True,),
        "attention_bias": (False,),
        "altup_num_inputs": (4,),
        "altup_active_idx": (0,),
        "altup_correct_scale": (True,),
        "laurel_rank": (64,),
        "hidden_size_per_layer_input": (256,),
        "final_logit_softcapping": (30.0,),
    },
    rope=_rope,
    check=_check,
    kinds=_kinds,
    unused=(r"(model\.)?(vision|audio)_tower\..*", r"(model\.)?embed_(vision|audio)\..*"),
)
