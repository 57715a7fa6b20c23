"""Gemma 3 with its eyes: SigLIP, whose rows are averaged over squares of patches."""

from __future__ import annotations

import math
from dataclasses import replace

from puna.gguf.convert.families import gemma
from puna.gguf.convert.families.eyes import colours, lengths, only, sizes
from puna.gguf.convert.fields import Fields
from puna.gguf.convert.table import Family, Line, always, plus_one, whole


def _side(fields: Fields) -> int:
    """Patches along a side."""
    return fields.whole("image_size", high=1 << 14) // fields.whole("patch_size", high=256)


def _cell(fields: Fields) -> int:
    """So many of them, squared, become one row.

    Errors: FileFormatError for rows that are no square, or do not divide the patches.
    """
    n_rows = fields.whole("mm_tokens_per_image", default=256, high=_side(fields) ** 2)
    rows = math.isqrt(n_rows)
    if rows**2 != n_rows or _side(fields) % rows:
        raise fields.wrong("mm_tokens_per_image", n_rows, f"which {_side(fields)} patches along a side do not divide into")
    return _side(fields) // rows


_EYES = Family(
    architecture="clip",
    layer=(
        *(
            Line(ours, theirs, dims, biased=always)
            for ours, theirs, dims in (
                ("ln1", "layer_norm1", "embd"),
                ("ln2", "layer_norm2", "embd"),
                ("attn_q", "self_attn.q_proj", "embd embd"),
                ("attn_k", "self_attn.k_proj", "embd embd"),
                ("attn_v", "self_attn.v_proj", "embd embd"),
                ("attn_out", "self_attn.out_proj", "embd embd"),
                ("ffn_up", "mlp.fc1", "ff embd"),
                ("ffn_down", "mlp.fc2", "embd ff"),
            )
        ),
    ),
    ends=(
        Line("v.patch_embd", "embeddings.patch_embedding", "embd 3 patch patch", exact=True, biased=always),
        Line("v.position_embd", "embeddings.position_embedding", "places embd", exact=True),
        Line("v.post_ln", "post_layernorm", "embd", biased=always),
        Line("mm.soft_emb_norm", "/multi_modal_projector.mm_soft_emb_norm", "embd", plus_one),
        Line("mm.input_projection.weight", "/multi_modal_projector.mm_input_projection_weight", "embd text", whole=True),
    ),
    keys={
        **sizes("gemma3"),
        "use_gelu": lambda fields: True,
        "vision.image_size": whole("image_size", high=1 << 14),
        "vision.attention.layer_norm_epsilon": lambda fields: fields.positive("layer_norm_eps", default=1e-6),
        "vision.projector.scale_factor": _cell,
    },
    lengths={**lengths(), "places": lambda fields: _side(fields) ** 2},
    # As the family's only published encoder.
    defaults={
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "patch_size": 14,
        "image_size": 896,
    },
    expects={"hidden_act": ("gelu_pytorch_tanh",), "num_channels": (3,)},
    ours="v.blk.{i}.",
    layers="encoder.layers.{i}.",
    roots=("vision_tower.vision_model.", "vision_tower.", "model.vision_tower.vision_model.", "model.vision_tower."),
    table="embeddings.patch_embedding.weight",
    unused=(only("vision_tower", "multi_modal_projector"), r"(model\.)?vision_tower\.(vision_model\.)?head\..*"),
    beside=colours(([0.5] * 3, [0.5] * 3)),
)

GEMMA3 = replace(gemma.GEMMA3, unused=gemma.VISION, eyes=_EYES)
