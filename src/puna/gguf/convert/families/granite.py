"""Granite 3 and 4, dense, with experts, and with Mamba-2 layers."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

from puna.errors import UnsupportedModel
from puna.gguf.convert.families.common import (
    ENDS,
    EPS,
    HEADS,
    KEYS,
    LENGTHS,
    MIXED,
    NORMS,
    PAIRED_QKV,
    SILU,
    SIZES,
    count,
    head,
    mixture,
    n_kv_heads,
    n_layers,
    per_layer,
    router,
    swiglu,
    used,
)
from puna.gguf.convert.families.mamba import mamba_keys, mamba_lengths, mamba_lines
from puna.gguf.convert.fields import Fields
from puna.gguf.convert.rotation import LINEAR, YARN, Rotation
from puna.gguf.convert.table import Family, Line, Value, halves, positive, whole

_MULTIPLIERS: Mapping[str, Value] = {
    "embedding_scale": positive("embedding_multiplier", default=1.0),
    "residual_scale": positive("residual_multiplier", default=1.0),
    "attention.scale": positive("attention_multiplier", default=1.0),
    "logit_scale": positive("logits_scaling", default=1.0),
}


def _rope(fields: Fields) -> dict[str, Any]:
    """Some of the fourth generation know no positions; the key that says so says something else in other families."""
    kind = fields.text("position_embedding_type", default="rope")
    if kind not in ("rope", "nope"):
        raise UnsupportedModel(f"{fields.file}: position_embedding_type is {kind[:40]!r}, only rope and nope can be converted")
    return {**Rotation(fields, head(fields), (LINEAR, YARN)).keys(), "rope.scaling.finetuned": kind == "rope"}


GRANITE = Family(
    architecture="granite",
    layer=(*NORMS, *PAIRED_QKV, MIXED, *swiglu()),
    ends=ENDS,
    keys={**KEYS, **_MULTIPLIERS},
    lengths=LENGTHS,
    expects=SILU,
    rope=_rope,
)

_KEYS, _LENGTHS = mixture(count("num_local_experts"), used("num_experts_per_tok"), whole("intermediate_size", high=1 << 24))
_BOTH = "experts 2*ff_expert embd"


def _experts(on: str = "") -> tuple[Line, ...]:
    moe = "block_sparse_moe."
    return (
        router(f"{moe}router.layer", on=on),
        Line("ffn_gate_exps", f"{moe}input_linear", _BOTH, halves(1, second=False), "experts ff_expert embd", on=on),
        Line("ffn_up_exps", f"{moe}input_linear", _BOTH, halves(1, second=True), "experts ff_expert embd", on=on),
        Line("ffn_down_exps", f"{moe}output_linear", "experts embd ff_expert", on=on),
    )


def _packed(suffix: str, width: str, on: str) -> tuple[Line, ...]:
    """An MLP whose gate and up are one matrix."""
    return (
        Line(f"ffn_gate{suffix}", "shared_mlp.input_linear", f"2*{width} embd", halves(0, second=False), f"{width} embd", on=on),
        Line(f"ffn_up{suffix}", "shared_mlp.input_linear", f"2*{width} embd", halves(0, second=True), f"{width} embd", on=on),
        Line(f"ffn_down{suffix}", "shared_mlp.output_linear", f"embd {width}", on=on),
    )


GRANITEMOE = replace(
    GRANITE,
    architecture="granitemoe",
    layer=(*NORMS, *PAIRED_QKV, MIXED, *_experts()),
    keys={**GRANITE.keys, **_KEYS},
    lengths={**LENGTHS, **_LENGTHS},
    # Where there are experts, no key says that positions are unknown.
    expects=SILU | {"position_embedding_type": ("rope",)},
)

_SHARED = whole("shared_intermediate_size", high=1 << 24)

GRANITEMOE_SHARED = replace(
    GRANITEMOE,
    layer=(*GRANITEMOE.layer, *_packed("_shexp", "ff_shared", "")),
    keys={**GRANITEMOE.keys, "expert_shared_feed_forward_length": _SHARED},
    lengths={**GRANITEMOE.lengths, "ff_shared": _SHARED},
)

_MAMBA, _ATTENTION = "mamba", "attention"


def _kinds_of(fields: Fields) -> list[str]:
    named = per_layer(
        fields, "layers_block_type" if fields.has("layers_block_type") else "layer_types", [_MAMBA] * n_layers(fields)
    )
    kinds = [{"full_attention": _ATTENTION}.get(kind, kind) for kind in named]
    if unknown := set(kinds) - {_MAMBA, _ATTENTION}:
        raise UnsupportedModel(f"{fields.file}: layer_types has {sorted(unknown)[0][:60]!r}, which cannot be converted")
    return kinds


def _is_mixed(fields: Fields) -> bool:
    return fields.whole("num_local_experts", default=0, low=0) > 0


def _kinds(fields: Fields, layer: int) -> Set[str]:
    return {_kinds_of(fields)[layer], "experts" if _is_mixed(fields) else "dense"}


def _only_mixed(values: Mapping[str, Value]) -> Mapping[str, Value]:
    def one(value: Value) -> Value:
        return lambda fields: value(fields) if _is_mixed(fields) else None

    return {key: one(value) for key, value in values.items()}


def _ff(fields: Fields) -> int:
    """Without experts the shared MLP is all there is."""
    return int(whole("intermediate_size", high=1 << 24)(fields) if _is_mixed(fields) else _SHARED(fields))


_SHAPE = {
    "inner": "mamba_expand",
    "heads": "mamba_n_heads",
    "head": "mamba_d_head",
    "state": "mamba_d_state",
    "groups": "mamba_n_groups",
}
_SHAPE |= {"conv": "mamba_d_conv"}

GRANITE_HYBRID = replace(
    GRANITE,
    architecture="granitehybrid",
    layer=(
        *NORMS,
        *(replace(line, on=_ATTENTION) for line in (*PAIRED_QKV, MIXED)),
        *mamba_lines("mamba.", on=_MAMBA),
        *_experts("experts"),
        *_packed("_shexp", "ff_shared", "experts"),
        *_packed("", "ff_shared", "dense"),
    ),
    keys={
        **SIZES,
        **HEADS,
        **EPS,
        **_MULTIPLIERS,
        **mamba_keys(_SHAPE),
        "feed_forward_length": _ff,
        "attention.head_count_kv": lambda fields: [n_kv_heads(fields) if kind == _ATTENTION else 0 for kind in _kinds_of(fields)],
        **_only_mixed({**_KEYS, "expert_shared_feed_forward_length": _SHARED}),
    },
    lengths={
        **{name: value for name, value in LENGTHS.items() if name != "ff"},
        **mamba_lengths(_SHAPE),
        "ff_shared": _SHARED,
        "experts": lambda fields: count("num_local_experts")(fields) if _is_mixed(fields) else 0,
        "ff_expert": whole("intermediate_size", high=1 << 24),
    },
    kinds=_kinds,
)
