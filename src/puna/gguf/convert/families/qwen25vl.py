"""Qwen 2.5-VL: Qwen 2 whose pairs turn along three axes, and its eyes, most of whose layers attend within windows.

The patch embedding takes two frames of a film, each with a matrix of its own in GGUF.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from puna.errors import UnsupportedModel
from puna.gguf.convert.checkpoint import Checkpoint
from puna.gguf.convert.families.eyes import colours, frames, lengths, only, processor, sizes, turned_by_axes
from puna.gguf.convert.families.qwen import QWEN2
from puna.gguf.convert.fields import Fields
from puna.gguf.convert.table import Change, Family, Lengths, Line, Rows, always, whole

_CLIP = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
_MAX_ROWS = 4096  # of an image, as llama.cpp allows
_CELL = 2  # patches along a side of what becomes a row


def _third(number: int) -> Change:
    """Queries, keys or values of what is one matrix."""

    def cut(rows: Rows, lengths: Lengths) -> Rows:
        return np.asarray(rows.reshape(3, -1, *rows.shape[1:])[number])

    return cut


def _pattern(fields: Fields) -> int:
    """The last of so many layers sees everything.

    Errors: UnsupportedModel for another choice of layers.
    """
    n_layers = fields.whole("depth", high=1024)
    stated = fields.items("fullatt_block_indexes", default=[])
    period = stated[0] + 1 if stated and isinstance(stated[0], int) else 0
    if period < 1 or stated != list(range(period - 1, n_layers, period)):
        raise UnsupportedModel(
            f"{fields.file}: fullatt_block_indexes is {str(stated)[:60]}, only every so many-th can be converted"
        )
    return period


def _processed(checkpoint: Checkpoint) -> dict[str, Any]:
    """Also how large an image may be: no larger than GGUF's programs allow."""
    fields = processor(checkpoint)
    found = colours(_CLIP)(checkpoint)
    unit = (fields.whole("patch_size", default=14, high=256) * fields.whole("merge_size", default=_CELL, high=16)) ** 2
    for key, name in (("vision.image_min_pixels", "min_pixels"), ("vision.image_max_pixels", "max_pixels")):
        if fields.has(name):
            found[key] = min(fields.whole(name, high=1 << 31), _MAX_ROWS * unit)
    return found


_EYES = Family(
    architecture="clip",
    layer=(
        Line("ln1", "norm1", "embd"),
        Line("ln2", "norm2", "embd"),
        *(
            Line(f"attn_{part}", "attn.qkv", "3*embd embd", _third(i), "embd embd", biased=always)
            for i, part in enumerate(("q", "k", "v"))
        ),
        *(
            Line(ours, theirs, dims, biased=always)
            for ours, theirs, dims in (
                ("attn_out", "attn.proj", "embd embd"),
                ("ffn_gate", "mlp.gate_proj", "ff embd"),
                ("ffn_up", "mlp.up_proj", "ff embd"),
                ("ffn_down", "mlp.down_proj", "embd ff"),
            )
        ),
    ),
    ends=(
        *frames("patch_embed.proj.weight"),
        Line("v.post_ln", "merger.ln_q", "embd"),
        Line("mm.0", "merger.mlp.0", "merged merged", biased=always),
        Line("mm.2", "merger.mlp.2", "text merged", biased=always),
    ),
    keys={
        **sizes("qwen2.5vl_merger", heads="num_heads", layers="depth"),
        "use_silu": lambda fields: True,
        "vision.image_size": lambda fields: 560,  # of a first picture; they may have any
        "vision.attention.layer_norm_epsilon": lambda fields: 1e-6,
        "vision.n_wa_pattern": _pattern,
    },
    lengths={**lengths(heads="num_heads"), "merged": lambda fields: fields.whole("hidden_size", high=1 << 16) * _CELL**2},
    defaults={"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14},
    expects={
        "hidden_act": ("silu",),
        "in_channels": (3,),
        "in_chans": (3,),
        "spatial_merge_size": (_CELL,),
        "temporal_patch_size": (2,),
        "window_size": (112,),
    },
    n_layers=whole("depth", high=1024),
    ours="v.blk.{i}.",
    layers="blocks.{i}.",
    roots=("visual.", "model.visual."),
    table="patch_embed.proj.weight",
    unused=(only("visual"),),
    beside=_processed,
)

QWEN25VL = replace(QWEN2, architecture="qwen2vl", rope=turned_by_axes, unused=(r"(model\.)?visual\..*",), eyes=_EYES)
