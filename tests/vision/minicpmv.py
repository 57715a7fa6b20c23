"""Tiny models with the eyes of MiniCPM-V."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from puna.gguf.types import TensorType
from tests.tiny import write_llama
from tests.vision.files import Encoder, add_tokens
from tests.vision.gemma3 import add_layers

N_EMBD_TEXT = 256
TOKENS = ["<image>", "</image>", "<slice>", "</slice>"]


def write_text(path: Path, **options: Any) -> Path:
    return add_tokens(write_llama(path, **options), TOKENS)


def encoder(
    *,
    seed: int = 17,
    n_layers: int = 3,
    n_embd: int = 96,
    n_heads: int = 3,
    n_ff: int = 128,
    patch: int = 14,
    side: int = 6,
    n_queries: int = 10,
    version: int = 3,
    swapped: bool = True,
    n_text: int = N_EMBD_TEXT,
    dtype: str = "f32",
) -> Encoder:
    """Trained with *side* x *side* patches. *version*: the numbers that llama.cpp's converter counts them by, from 2.5 on."""
    e = Encoder(seed, TensorType.from_name(dtype))
    e.keys = {
        "projector_type": "resampler",
        "use_gelu": True,
        "minicpmv_version": np.int32(version),
        "minicpmv_query_num": n_queries,
        "vision.image_size": patch * side,
        "vision.patch_size": patch,
        "vision.embedding_length": n_embd,
        "vision.feed_forward_length": n_ff,
        "vision.block_count": n_layers,
        "vision.attention.head_count": n_heads,
        "vision.attention.layer_norm_epsilon": 1e-6,
        "vision.projection_dim": n_text,
        "vision.image_mean": [0.5, 0.5, 0.5],
        "vision.image_std": [0.5, 0.5, 0.5],
    }
    e.values("v.patch_embd.weight", (n_embd, 3, patch, patch), 1 / (patch * 3**0.5))
    e.values("v.patch_embd.bias", (n_embd,), 0.2)
    e.values("v.position_embd.weight", (70**2, n_embd), 0.5)
    add_layers(e, n_layers, n_embd, n_ff, swapped=swapped)
    e.norm("v.post_ln", n_embd)
    e.tensors["resampler.pos_embed_k"] = np.zeros(n_text, np.float32)  # which libmtmd asks for and computes anew
    e.matrix("resampler.kv.weight", n_text, n_embd)
    for name in ("q", "k", "v", "out"):
        e.linear(f"resampler.attn.{name}", n_text, n_text)
    for name in ("q", "kv", "post"):
        e.norm(f"resampler.ln_{name}", n_text)
    e.matrix("resampler.proj.weight", n_text, n_text)
    e.values("resampler.query", (n_queries, n_text))
    return e
