"""Tiny models with the eyes of LLaVA: CLIP or SigLIP, and a small network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from puna.gguf.types import TensorType
from puna.vision.metadata import CLIP_MEAN, CLIP_STD
from tests.tiny import write_llama
from tests.vision.files import Encoder, Floats
from tests.vision.gemma3 import add_layers

N_EMBD_TEXT = 256


def write_text(path: Path, **options: Any) -> Path:
    return write_llama(path, **options)


def encoder(
    *,
    seed: int = 9,
    n_layers: int = 3,
    n_embd: int = 48,
    n_heads: int = 3,
    n_ff: int = 80,
    patch: int = 14,
    side: int = 6,
    has_class: bool = True,
    features: Sequence[int] = (),
    norms: bool = False,
    one_matrix: bool = False,
    post_norm: bool = False,
    swapped: bool = True,
    pinpoints: Sequence[int] = (),
    unpad: bool = False,
    act: str | None = None,
    n_text: int = N_EMBD_TEXT,
    dtype: str = "f32",
) -> Encoder:
    """As llama.cpp's first converter wrote them: all layers up to the one whose values are wanted, without the norm after it.

    *norms*: with those of Yi's network.
    """
    e = Encoder(seed, TensorType.from_name(dtype))
    e.keys = {
        "has_llava_projector": True,
        "projector_type": "mlp",
        "use_gelu": act == "gelu",
        "vision.image_size": patch * side,
        "vision.patch_size": patch,
        "vision.embedding_length": n_embd,
        "vision.feed_forward_length": n_ff,
        "vision.block_count": n_layers,
        "vision.attention.head_count": n_heads,
        "vision.attention.layer_norm_epsilon": 1e-5,
        "vision.projection_dim": 768,
        "vision.image_mean": list(CLIP_MEAN),
        "vision.image_std": list(CLIP_STD),
    }
    if features:
        e.keys["vision.feature_layer"] = list(features)
    if pinpoints:
        e.keys["vision.image_grid_pinpoints"] = list(pinpoints)
        e.keys["vision.mm_patch_merge_type"] = "spatial_unpad" if unpad else "flat"
        e.values("model.image_newline", (n_text,))
    e.values("v.patch_embd.weight", (n_embd, 3, patch, patch), 1 / (patch * 3**0.5))
    e.values("v.position_embd.weight", (side**2 + has_class, n_embd), 0.5)
    if has_class:
        e.values("v.class_embd", (n_embd,))
        e.norm("v.pre_ln", n_embd)
    add_layers(e, n_layers, n_embd, n_ff, swapped=swapped)
    if post_norm:
        e.norm("v.post_ln", n_embd)
    e.linear("mm.0", n_text, n_embd * max(1, len(features)))
    if norms:
        e.norm("mm.1", n_text)
        e.linear("mm.3", n_text, n_text)
        e.norm("mm.4", n_text)
    elif not one_matrix:
        e.linear("mm.2", n_text, n_text)
    return e


def for_libmtmd(e: Encoder) -> Encoder:
    """The same model as libmtmd computes it: a further layer for it to pass over, and positions where it has the class."""
    keys, tensors = dict(e.keys), dict(e.tensors)
    if "vision.feature_layer" not in keys:
        n = keys["vision.block_count"]
        keys["vision.block_count"] = n + 1
        tensors |= {name.replace("blk.0.", f"blk.{n}."): v for name, v in e.tensors.items() if name.startswith("v.blk.0.")}
    if "v.class_embd" in tensors:
        tensors["v.position_embd.weight"] = np.roll(tensors["v.position_embd.weight"], -1, 0)
    return replace(e, keys=keys, tensors=tensors)


def shared(ours: Floats, theirs: Floats, e: Encoder) -> tuple[Floats, Floats]:
    """libmtmd has the image as a whole after its tiles. Of each piece it leaves the first patch out and ends with the class."""
    has_class = "v.class_embd" in e.tensors
    n = len(e.tensors["v.position_embd.weight"]) - has_class
    ours, theirs = (rows.reshape(-1, n, rows.shape[-1]) for rows in (ours, theirs))
    theirs = np.roll(theirs, 1, 0)
    return (ours[:, 1:], theirs[:, :-1]) if has_class else (ours, theirs)
