"""Tiny models with the eyes of Pixtral and of Mistral Small 3."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from puna.gguf.types import TensorType
from puna.vision.metadata import CLIP_MEAN, CLIP_STD
from tests.models.mistral3 import MISTRAL3
from tests.tiny import write_llama
from tests.vision.files import Encoder, Floats, add_tokens

N_EMBD_TEXT = 256
TOKENS = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]


def write_text(path: Path, **options: Any) -> Path:
    """A Mistral Small; Pixtral's first language model is a write_llama."""
    return add_tokens(MISTRAL3.write(path, **options), TOKENS)


def write_first_text(path: Path, **options: Any) -> Path:
    return add_tokens(write_llama(path, **options), TOKENS)


def encoder(
    *,
    seed: int = 5,
    n_layers: int = 3,
    n_heads: int = 3,
    head_dim: int = 16,
    n_ff: int = 80,
    patch: int = 14,
    image_size: int = 280,
    cell: int = 2,
    biases: bool = False,
    act: str = "silu",
    n_text: int = N_EMBD_TEXT,
    dtype: str = "f32",
) -> Encoder:
    """Where *cell* is 1 nothing merges patches, as in the first Pixtral. With the row of [IMG_BREAK] that libmtmd asks for."""
    n_embd = n_heads * head_dim
    e = Encoder(seed, TensorType.from_name(dtype))
    e.keys = {
        "projector_type": "pixtral",
        f"use_{act}": True,
        "vision.image_size": image_size,
        "vision.patch_size": patch,
        "vision.embedding_length": n_embd,
        "vision.feed_forward_length": n_ff,
        "vision.block_count": n_layers,
        "vision.attention.head_count": n_heads,
        "vision.attention.layer_norm_epsilon": 1e-5,
        "vision.projection_dim": n_text,
        "vision.image_mean": list(CLIP_MEAN),
        "vision.image_std": list(CLIP_STD),
    }
    e.values("v.patch_embd.weight", (n_embd, 3, patch, patch), 1 / (patch * 3**0.5))
    e.norm("v.pre_ln", n_embd, bias=False)
    for i in range(n_layers):
        prefix = f"v.blk.{i}"
        e.norm(f"{prefix}.ln1", n_embd, bias=False)
        e.norm(f"{prefix}.ln2", n_embd, bias=False)
        for name in ("attn_q", "attn_k", "attn_v"):
            e.matrix(f"{prefix}.{name}.weight", n_embd, n_embd)
        e.matrix(f"{prefix}.attn_out.weight", n_embd, n_embd)
        e.matrix(f"{prefix}.ffn_gate.weight", n_ff, n_embd)
        e.matrix(f"{prefix}.ffn_up.weight", n_ff, n_embd)
        e.matrix(f"{prefix}.ffn_down.weight", n_embd, n_ff)
    if cell > 1:
        e.keys["vision.spatial_merge_size"] = cell
        e.norm("mm.input_norm", n_embd, bias=False)
        e.matrix("mm.patch_merger.weight", n_embd, n_embd * cell**2)
    e.linear("mm.1", n_text, n_embd, bias=biases)
    e.linear("mm.2", n_text, n_text, bias=biases)
    e.tensors["v.token_embd.img_break"] = np.random.default_rng(seed).standard_normal(n_text).astype(np.float32)
    return e


RENAMED = {
    r"^v\.patch_embd": "v.patch_conv",
    r"^v\.pre_ln": "v.encoder_norm",
    r"\.ln1\.": ".attn_norm.",
    r"\.ln2\.": ".ffn_norm.",
    r"attn_out\.": "attn_output.",
    r"^mm\.(\d)\.": r"mm.linear_\1.",
    r"^mm\.input_norm": "mm.norm",
    r"^mm\.patch_merger": "mm.patch_merger.merging_layer",
}


def _halves(values: Floats, n_heads: int) -> Floats:
    """Rows of neighbours that make a pair, back to halves of a head that do."""
    return np.ascontiguousarray(values.reshape(n_heads, -1, 2, values.shape[-1]).swapaxes(1, 2).reshape(values.shape))


def save_as_one(e: Encoder, text: Path, path: Path) -> Path:
    """As the ancestor's converter does."""
    n_heads = e.keys["vision.attention.head_count"]
    turned = {name: _halves(v, n_heads) if ".attn_q." in name or ".attn_k." in name else v for name, v in e.tensors.items()}
    wanted = (
        "vision.block_count", "vision.embedding_length", "vision.feed_forward_length", "vision.attention.head_count",
        "vision.image_size", "vision.patch_size",
    )  # fmt: skip
    keys = {key: e.keys[key] for key in wanted}
    keys |= {
        "vision.attention.key_length": e.keys["vision.embedding_length"] // n_heads,
        "vision.num_channels": 3,
        "vision.rope.freq_base": 10000.0,
        "spatial_merge_size": e.keys["vision.spatial_merge_size"],
    }
    whole = replace(e, tensors=turned)
    return whole.save_with(text, path, rename=RENAMED, keys=keys, leave_out=["v.token_embd.img_break"])
