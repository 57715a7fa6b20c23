"""Mistral Small 3.1 and 3.2 and Ministral 3 with their eyes: Pixtral, whose patches know their row and column by rotation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from puna.gguf.convert.families import mistral3
from puna.gguf.convert.families.eyes import colours, lengths, only, sizes
from puna.gguf.convert.fields import Fields
from puna.gguf.convert.table import Family, Lengths, Line, Rows, Value, interleaved, stated, whole

_BREAK = "[IMG_BREAK]"
_CLIP = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])


def _cell(fields: Fields) -> int:
    return fields.whole("spatial_merge_size", default=2, high=16)


def _check(fields: Fields) -> None:
    """Errors: FileFormatError for heads that are not as wide as their number makes them; UnsupportedModel."""
    width, n_heads = fields.whole("hidden_size", high=1 << 16), fields.whole("num_attention_heads", high=1 << 12)
    if fields.whole("head_dim", default=width // n_heads) * n_heads != width:
        raise fields.wrong("head_dim", fields.get("head_dim"), f"of which {n_heads} make no {width}")
    options = fields.object("rope_parameters")
    base = options.number("rope_theta", default=fields.number("rope_theta", default=10000.0))
    if base != 10000.0:
        raise fields.wrong("rope_theta", base, "where an encoder of images can only be converted with 10000")


def _is(name: str) -> Value:
    return lambda fields: True if fields.text("hidden_act", default="silu") == name else None


def _row(rows: Rows, lengths: Lengths) -> Rows:
    """The embedding of the token that ends a row of an image, which the projector's file repeats."""
    return np.asarray(rows[lengths["break"]])


def _layer() -> tuple[Line, ...]:
    turned = interleaved("heads")
    return (
        Line("ln1", "attention_norm", "embd"),
        Line("ln2", "ffn_norm", "embd"),
        Line("attn_q", "attention.q_proj", "embd embd", turned),
        Line("attn_k", "attention.k_proj", "embd embd", turned),
        Line("attn_v", "attention.v_proj", "embd embd"),
        Line("attn_out", "attention.o_proj", "embd embd"),
        Line("ffn_gate", "feed_forward.gate_proj", "ff embd"),
        Line("ffn_up", "feed_forward.up_proj", "ff embd"),
        Line("ffn_down", "feed_forward.down_proj", "embd ff"),
    )


_biased = stated("multimodal_projector_bias")

_EYES = Family(
    architecture="clip",
    layer=_layer(),
    ends=(
        Line("v.patch_embd", "patch_conv", "embd 3 patch patch", exact=True),
        Line("v.pre_ln", "ln_pre", "embd"),
        Line("mm.input_norm", "/multi_modal_projector.norm", "embd"),
        Line("mm.patch_merger", "/multi_modal_projector.patch_merger.merging_layer", "embd merged"),
        Line("mm.1", "/multi_modal_projector.linear_1", "text embd", biased=_biased),
        Line("mm.2", "/multi_modal_projector.linear_2", "text text", biased=_biased),
        Line("v.token_embd.img_break", "/embed_tokens.weight", "vocab text", _row, "text", whole=True),
    ),
    keys={
        **sizes("pixtral"),
        "use_silu": _is("silu"),
        "use_gelu": _is("gelu"),
        "vision.image_size": whole("image_size", default=1540, high=1 << 14),
        "vision.attention.layer_norm_epsilon": lambda fields: 1e-5,
        "vision.spatial_merge_size": _cell,
    },
    lengths={**lengths(), "merged": lambda fields: fields.whole("hidden_size", high=1 << 16) * _cell(fields) ** 2},
    defaults={
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "patch_size": 14,
    },
    expects={
        "hidden_act": ("silu", "gelu"),
        "num_channels": (3,),
        "projector_hidden_act": ("gelu",),
        "vision_feature_layer": (-1,),
    },
    check=_check,
    ours="v.blk.{i}.",
    layers="transformer.layers.{i}.",
    roots=("vision_tower.", "model.vision_tower."),
    table="patch_conv.weight",
    unused=(only("vision_tower", "multi_modal_projector"),),
    beside=colours(_CLIP),
    tokens={"break": _BREAK},
)

MISTRAL3 = replace(mistral3.MISTRAL3, eyes=_EYES)
