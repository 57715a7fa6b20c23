"""Families with Mamba-2 layers: Mamba-2 itself, Nemotron-H and Nemotron 3 Nano, Falcon-H1."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace

from puna.errors import UnsupportedModel
from puna.gguf.convert.families.common import (
    ENDS,
    HEADS,
    LENGTHS,
    MIXED,
    QKV,
    count,
    n_kv_heads,
    n_layers,
    per_layer,
    used,
)
from puna.gguf.convert.fields import Fields
from puna.gguf.convert.table import Family, Lengths, Line, Rows, Value, column, decay, positive, squeezed, stated, then, whole

_MOST = 1 << 20  # channels


def _named(shape: Mapping[str, str], part: str, high: int = 1 << 20) -> Value:
    return whole(shape[part], high=high)


def mamba_lengths(shape: Mapping[str, str]) -> Mapping[str, Value]:
    """Axes of a layer; *shape* names the fields: heads, head (the width of one), state, groups, conv."""
    heads, width, state, groups = (_named(shape, part) for part in ("heads", "head", "state", "groups"))

    def inner(fields: Fields) -> int:
        found = int(heads(fields) * width(fields))
        if found > _MOST:
            raise fields.wrong(shape["heads"], heads(fields), f"which makes {found} channels, more than {_MOST}")
        if heads(fields) % groups(fields):
            raise fields.wrong(shape["groups"], groups(fields), f"which {heads(fields)} heads cannot share")
        return found

    def channels(fields: Fields) -> int:
        return int(inner(fields) + 2 * groups(fields) * state(fields))

    return {
        "ssm_heads": heads,
        "ssm_inner": inner,
        "ssm_groups": groups,
        "ssm_group": lambda fields: inner(fields) // groups(fields),
        "ssm_channels": channels,
        "ssm_in": lambda fields: inner(fields) + channels(fields) + heads(fields),
        "conv": _named(shape, "conv", 64),
    }


def mamba_keys(shape: Mapping[str, str]) -> Mapping[str, Value]:
    lengths = mamba_lengths(shape)
    return {
        "ssm.conv_kernel": lengths["conv"],
        "ssm.inner_size": lengths["ssm_inner"],
        "ssm.state_size": _named(shape, "state"),
        "ssm.time_step_rank": lengths["ssm_heads"],
        "ssm.group_count": lengths["ssm_groups"],
    }


def _by_group(rows: Rows, lengths: Lengths) -> Rows:
    return rows.reshape(lengths["ssm_groups"], lengths["ssm_group"])


_PROJECTS_WITH = stated("use_bias", "mamba_proj_bias")


def mamba_lines(theirs: str, *, on: str = "") -> tuple[Line, ...]:
    return (
        Line("ssm_in", f"{theirs}in_proj", "ssm_in embd", on=on, biased=_PROJECTS_WITH),
        Line(
            "ssm_conv1d",
            f"{theirs}conv1d",
            "ssm_channels 1 conv",
            squeezed,
            "ssm_channels conv",
            on=on,
            exact=True,
            changes_bias=False,
            biased=stated("use_conv_bias", "mamba_conv_bias", default=True),
        ),
        Line("ssm_dt.bias", f"{theirs}dt_bias", "ssm_heads", on=on, whole=True),
        Line("ssm_a", f"{theirs}A_log", "ssm_heads", then(decay, column), "ssm_heads 1", on=on, whole=True, exact=True),
        Line("ssm_d", f"{theirs}D", "ssm_heads", column, "ssm_heads 1", on=on, whole=True, exact=True),
        Line("ssm_norm", f"{theirs}norm", "ssm_inner", _by_group, "ssm_groups ssm_group", on=on, exact=True),
        Line("ssm_out", f"{theirs}out_proj", "embd ssm_inner", on=on, biased=_PROJECTS_WITH),
    )


_NO_LIMIT = ([0, float("inf")], [0, {"__float__": "Infinity"}])  # two ways to write what JSON has no word for


def check_time_steps(fields: Fields) -> None:
    """Errors: UnsupportedModel for time steps that are cut off."""
    limit = fields.get("time_step_limit")
    if limit is not None and limit not in _NO_LIMIT:
        raise UnsupportedModel(
            f"{fields.file}: time_step_limit is {str(limit)[:60]}; only time steps without limits can be converted"
        )


_ACTIVATIONS = {"hidden_act": ("silu", "swish"), "mamba_hidden_act": ("silu", "swish")}
_SHAPE = {"heads": "num_heads", "head": "head_dim", "state": "state_size", "groups": "n_groups", "conv": "conv_kernel"}

MAMBA2 = Family(
    architecture="mamba2",
    layer=(Line("attn_norm", "norm", "embd"), *mamba_lines("mixer.")),
    ends=(Line("token_embd", "embeddings", "vocab embd"), Line("output_norm", "norm_f", "embd"), ENDS[2]),
    keys={
        "context_length": lambda fields: 1 << 20,  # a state has no length
        "embedding_length": whole("hidden_size", high=1 << 20),
        "block_count": n_layers,
        "feed_forward_length": lambda fields: 0,
        "attention.head_count": lambda fields: 0,
        "attention.layer_norm_rms_epsilon": positive("layer_norm_epsilon", default=1e-5),
        **mamba_keys(_SHAPE),
    },
    lengths={"embd": LENGTHS["embd"], **mamba_lengths(_SHAPE)},
    expects=_ACTIVATIONS,
    check=check_time_steps,
    roots=("backbone.",),
    table="embeddings.weight",
)

# Nemotron.

_SYMBOLS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_NAMES = {"full_attention": "attention", "linear_attention": "mamba"}


def _parts(fields: Fields) -> list[str]:
    """What each layer is, as a word for each or a letter."""
    if fields.has("hybrid_override_pattern"):
        pattern = fields.text("hybrid_override_pattern")
        if len(pattern) != n_layers(fields) or set(pattern) - set(_SYMBOLS):
            raise fields.wrong("hybrid_override_pattern", pattern, f"not {n_layers(fields)} of the letters {''.join(_SYMBOLS)}")
        return [_SYMBOLS[letter] for letter in pattern]
    named = per_layer(fields, "layers_block_type" if fields.has("layers_block_type") else "layer_types", [])
    kinds = [_NAMES.get(kind, kind) for kind in named]
    if unknown := set(kinds) - set(_SYMBOLS.values()):
        raise UnsupportedModel(f"{fields.file}: layers_block_type has {sorted(unknown)[0][:60]!r}, which cannot be converted")
    return kinds


def _kinds(fields: Fields, layer: int) -> Set[str]:
    kind = _parts(fields)[layer]
    return {kind, "latent"} if kind == "moe" and fields.has("moe_latent_size") else {kind}


def _width(fields: Fields, kind: str) -> int:
    """Of what a layer has of an MLP; llama.cpp takes one without for a state."""
    names = {"mlp": "intermediate_size", "moe": "moe_intermediate_size"}
    return fields.whole(names[kind], high=1 << 24) if kind in names else 0


_NEMOTRON_SHAPE = {
    "heads": "mamba_num_heads",
    "head": "mamba_head_dim",
    "state": "ssm_state_size",
    "groups": "n_groups",
    "conv": "conv_kernel",
}
_latent = whole("moe_latent_size", high=1 << 20)
_COMMON = (
    Line("attn_norm", "norm", "embd"),
    *mamba_lines("mixer.", on="mamba"),
    *(replace(line, theirs=line.theirs.replace("self_attn", "mixer"), on="attention") for line in (*QKV, MIXED)),
    Line("ffn_up", "mixer.up_proj", "ff embd", on="mlp", biased=stated("mlp_bias")),
    Line("ffn_down", "mixer.down_proj", "embd ff", on="mlp", biased=stated("mlp_bias")),
)

NEMOTRON_H = Family(
    architecture="nemotron_h",
    layer=_COMMON,
    ends=MAMBA2.ends,
    keys={
        "context_length": whole("max_position_embeddings"),
        "embedding_length": whole("hidden_size", high=1 << 20),
        "block_count": n_layers,
        "feed_forward_length": lambda fields: [_width(fields, kind) for kind in _parts(fields)],
        **HEADS,
        "attention.head_count_kv": lambda fields: [n_kv_heads(fields) if kind == "attention" else 0 for kind in _parts(fields)],
        "attention.layer_norm_rms_epsilon": positive("layer_norm_epsilon", "norm_eps", default=1e-5),
        "attention.layer_norm_epsilon": positive("layer_norm_epsilon", "norm_eps", default=1e-5),
        **mamba_keys(_NEMOTRON_SHAPE),
    },
    lengths={
        **{k: v for k, v in LENGTHS.items() if k != "ff"},
        "ff": whole("intermediate_size", default=1, high=1 << 24),
        **mamba_lengths(_NEMOTRON_SHAPE),
    },
    defaults={"n_groups": 8, "conv_kernel": 4},
    expects={"mlp_hidden_act": ("relu2",), "mamba_hidden_act": ("silu",)},
    check=check_time_steps,
    kinds=_kinds,
    roots=("backbone.", "model."),
    table="embeddings.weight",
    unused=(r"mtp\..*",),
)

_SHARED = whole("moe_shared_expert_intermediate_size", high=1 << 24)

NEMOTRON_H_MOE = replace(
    NEMOTRON_H,
    architecture="nemotron_h_moe",
    layer=(
        *_COMMON,
        Line("ffn_gate_inp", "mixer.gate", "experts embd", on="moe", exact=True),
        Line("exp_probs_b.bias", "mixer.gate.e_score_correction_bias", "experts", on="moe", whole=True),
        Line("ffn_up_exps", "mixer.experts.{e}.up_proj", "ff_expert latent", on="moe"),
        Line("ffn_down_exps", "mixer.experts.{e}.down_proj", "latent ff_expert", on="moe"),
        Line("ffn_up_shexp", "mixer.shared_experts.up_proj", "ff_shared embd", on="moe"),
        Line("ffn_down_shexp", "mixer.shared_experts.down_proj", "embd ff_shared", on="moe"),
        Line("ffn_latent_down", "mixer.fc1_latent_proj", "latent embd", on="latent"),
        Line("ffn_latent_up", "mixer.fc2_latent_proj", "embd latent", on="latent"),
    ),
    keys={
        **NEMOTRON_H.keys,
        "expert_count": count("n_routed_experts"),
        "expert_used_count": used("num_experts_per_tok"),
        "expert_shared_count": whole("n_shared_experts", default=1, high=1 << 12),
        "expert_feed_forward_length": whole("moe_intermediate_size", high=1 << 24),
        "expert_shared_feed_forward_length": _SHARED,
        "expert_weights_norm": lambda fields: fields.flag("norm_topk_prob", default=True),
        "expert_weights_scale": positive("routed_scaling_factor", default=1.0),
        "expert_group_count": whole("n_group", default=1, high=1 << 12),
        "expert_group_used_count": whole("topk_group", default=1, high=1 << 12),
        "moe_latent_size": lambda fields: _latent(fields) if fields.has("moe_latent_size") else None,
    },
    lengths={
        **NEMOTRON_H.lengths,
        "experts": count("n_routed_experts"),
        "ff_expert": whole("moe_intermediate_size", high=1 << 24),
        "ff_shared": _SHARED,
        "latent": lambda fields: _latent(fields) if fields.has("moe_latent_size") else LENGTHS["embd"](fields),
    },
)


def nemotron(fields: Fields) -> Family:
    return NEMOTRON_H_MOE if "moe" in _parts(fields) else NEMOTRON_H
