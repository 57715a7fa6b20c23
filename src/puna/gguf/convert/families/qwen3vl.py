"""Qwen 3-VL, dense and with experts: Qwen 3 whose pairs turn along three axes, and its eyes, some of whose layers give the first
of the language part something beside the last one's (DeepStack).

Matrices of experts are stored the other way round, gate and up as one.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from puna.errors import FileFormatError
from puna.gguf.convert.families.eyes import colours, frames, lengths, only, sizes, turned_by_axes
from puna.gguf.convert.families.qwen import QWEN3, QWEN3MOE
from puna.gguf.convert.fields import Fields
from puna.gguf.convert.table import Family, Line, always, halves, then, transposed, whole

_CELL = 2  # patches along a side of what becomes a row


_BOTH, _TURNED = "experts embd 2*ff_expert", "experts ff_expert embd"
_EXPERTS = (
    *(
        Line(f"{ours}.weight", "mlp.experts.gate_up_proj", _BOTH, then(halves(2, second=second), transposed), _TURNED, whole=True)
        for ours, second in (("ffn_gate_exps", False), ("ffn_up_exps", True))
    ),
    Line("ffn_down_exps.weight", "mlp.experts.down_proj", _TURNED, transposed, "experts embd ff_expert", whole=True),
)


def _places(fields: Fields) -> int:
    """Learned vectors, one for each patch of a square.

    Errors: FileFormatError for a number that is none.
    """
    found = fields.whole("num_position_embeddings", default=2304, high=1 << 20)
    if math.isqrt(found) ** 2 != found:
        raise fields.wrong("num_position_embeddings", found, "no square")
    return found


def _giving(fields: Fields) -> list[int]:
    """The encoder's layers that give something, in order.

    Errors: FileFormatError.
    """
    found = fields.items("deepstack_visual_indexes", default=[])
    n_layers = fields.whole("depth", default=27, high=1024)
    if found != sorted(set(found)) or not all(isinstance(i, int) and 0 <= i < n_layers for i in found):
        raise FileFormatError(f"{fields.file}: deepstack_visual_indexes is {str(found)[:60]}, not layers in order")
    return found


def _eyes(vision: Fields) -> Family:
    giving = _giving(vision)
    merged = (("linear_fc1", "fc1", "merged merged"), ("linear_fc2", "fc2", "text merged"))
    return Family(
        architecture="clip",
        layer=tuple(
            Line(ours, theirs, dims, biased=always)
            for ours, theirs, dims in (
                ("ln1", "norm1", "embd"),
                ("ln2", "norm2", "embd"),
                ("attn_qkv", "attn.qkv", "3*embd embd"),
                ("attn_out", "attn.proj", "embd embd"),
                ("ffn_up", "mlp.linear_fc1", "ff embd"),
                ("ffn_down", "mlp.linear_fc2", "embd ff"),
            )
        ),
        ends=(
            *frames("patch_embed.proj.weight"),
            Line("v.patch_embd.bias", "patch_embed.proj.bias", "embd", whole=True),
            Line("v.position_embd", "pos_embed", "places embd", exact=True),
            Line("v.post_ln", "merger.norm", "embd", biased=always),
            Line("mm.0", "merger.linear_fc1", "merged merged", biased=always),
            Line("mm.2", "merger.linear_fc2", "text merged", biased=always),
            *(
                Line(f"v.deepstack.{layer}.{ours}", f"deepstack_merger_list.{i}.{theirs}", dims, biased=always)
                for i, layer in enumerate(giving)
                for theirs, ours, dims in (("norm", "norm", "merged"), *merged)
            ),
        ),
        keys={
            **sizes("qwen3vl_merger", heads="num_heads", layers="depth"),
            "use_gelu": lambda fields: True,
            "vision.image_size": lambda fields: math.isqrt(_places(fields)) * fields.whole("patch_size", high=256),
            "vision.attention.layer_norm_epsilon": lambda fields: 1e-6,
            "vision.spatial_merge_size": lambda fields: _CELL,
            "vision.is_deepstack_layers": lambda fields: [i in giving for i in range(fields.whole("depth", high=1024))],
        },
        lengths={
            **lengths(heads="num_heads"),
            "merged": lambda fields: fields.whole("hidden_size", high=1 << 16) * _CELL**2,
            "places": _places,
        },
        defaults={"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16},
        expects={
            "hidden_act": ("gelu_pytorch_tanh",),
            "in_channels": (3,),
            "spatial_merge_size": (_CELL,),
            "temporal_patch_size": (2,),
        },
        n_layers=whole("depth", high=1024),
        ours="v.blk.{i}.",
        layers="blocks.{i}.",
        roots=("model.visual.", "visual."),
        table="patch_embed.proj.weight",
        unused=(only("visual"),),
        beside=colours(([0.5] * 3, [0.5] * 3)),
    )


def qwen3vl(fields: Fields) -> Family:
    """Errors: FileFormatError naming a field."""
    return _seeing(QWEN3, "qwen3vl", fields)


def qwen3vlmoe(fields: Fields) -> Family:
    """Errors: FileFormatError naming a field."""
    return _seeing(replace(QWEN3MOE, layer=(*QWEN3MOE.layer[:-3], *_EXPERTS)), "qwen3vlmoe", fields)


def _seeing(text: Family, architecture: str, fields: Fields) -> Family:
    vision = fields.object("vision_config")
    n_giving = len(_giving(vision))

    def rope(stated: Fields) -> dict[str, Any]:
        return {**turned_by_axes(stated), "n_deepstack_layers": n_giving}

    return replace(text, architecture=architecture, rope=rope, unused=(r"(model\.)?visual\..*",), eyes=_eyes(vision))
