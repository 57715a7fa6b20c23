"""Tiny models with InternVL's eyes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from puna.gguf.types import TensorType
from puna.vision.metadata import CLIP_MEAN, CLIP_STD
from tests.tiny import write_llama
from tests.vision.files import Encoder, add_tokens
from tests.vision.gemma3 import add_layers

N_EMBD_TEXT = 256
TOKENS = ["<img>", "</img>"]


def write_text(path: Path, **options: Any) -> Path:
    return add_tokens(write_llama(path, **options), TOKENS)


def encoder(
    *,
    seed: int = 13,
    n_layers: int = 3,
    n_embd: int = 96,
    n_heads: int = 3,
    n_ff: int = 128,
    patch: int = 14,
    side: int = 6,
    cell: int = 2,
    tiles: tuple[int, int] | None = (1, 4),
    is_large: bool = False,
    n_text: int = N_EMBD_TEXT,
    dtype: str = "f32",
) -> Encoder:
    """*is_large*: with the norms of the encoder of 6B parameters."""
    e = Encoder(seed, TensorType.from_name(dtype))
    e.keys = {
        "projector_type": "internvl",
        "use_gelu": True,
        "vision.image_size": patch * side,
        "vision.patch_size": patch,
        "vision.embedding_length": n_embd,
        "vision.feed_forward_length": n_ff,
        "vision.block_count": n_layers,
        "vision.attention.head_count": n_heads,
        "vision.attention.layer_norm_epsilon": 1e-6,
        "vision.projection_dim": n_text,
        "vision.image_mean": list(CLIP_MEAN),
        "vision.image_std": list(CLIP_STD),
        "vision.projector.scale_factor": cell,
    }
    if tiles:
        e.keys |= {"vision.preproc_min_tiles": tiles[0], "vision.preproc_max_tiles": tiles[1]}
    e.values("v.patch_embd.weight", (n_embd, 3, patch, patch), 1 / (patch * 3**0.5))
    e.values("v.patch_embd.bias", (n_embd,), 0.2)
    e.values("v.position_embd.weight", (side**2 + 1, n_embd), 0.5)
    e.values("v.class_embd", (n_embd,))
    add_layers(e, n_layers, n_embd, n_ff)
    for i in range(n_layers if is_large else 0):
        for name in ("ln1", "ln2", "attn_q", "attn_k", "attn_v"):
            del e.tensors[f"v.blk.{i}.{name}.bias"]
        for name in ("attn_q_norm", "attn_k_norm"):
            e.norm(f"v.blk.{i}.{name}", n_embd, bias=False)
    for i in range(n_layers):
        for name in ("ls1", "ls2"):
            e.values(f"v.blk.{i}.{name}.weight", (n_embd,), 0.3, 0.7)
    e.norm("mm.model.mlp.0", n_embd * cell**2)
    e.linear("mm.model.mlp.1", n_text, n_embd * cell**2)
    e.linear("mm.model.mlp.3", n_text, n_text)
    return e


def for_libmtmd(e: Encoder) -> Encoder:
    """With positions where libmtmd has the class."""
    return replace(e, tensors=e.tensors | {"v.position_embd.weight": np.roll(e.tensors["v.position_embd.weight"], -1, 0)})
