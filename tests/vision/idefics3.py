"""Tiny models with the eyes of Idefics 3 and SmolVLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from puna.gguf.types import TensorType
from tests.tiny import write_llama
from tests.vision.files import Encoder, add_tokens
from tests.vision.gemma3 import add_layers

N_EMBD_TEXT = 256
ALONG = 4
TILES = [f"<row_{row}_col_{column}>" for row in range(1, ALONG + 1) for column in range(1, ALONG + 1)]
TOKENS = ["<fake_token_around_image>", "<global-img>", *TILES]


def write_text(path: Path, **options: Any) -> Path:
    return add_tokens(write_llama(path, **options), TOKENS, plain=["ĊĊ"])  # a line's end in bytes' letters


def encoder(
    *,
    seed: int = 11,
    n_layers: int = 3,
    n_embd: int = 96,
    n_heads: int = 3,
    n_ff: int = 128,
    patch: int = 14,
    side: int = 6,
    cell: int = 3,
    longest: int | None = None,
    swapped: bool = False,
    n_text: int = N_EMBD_TEXT,
    dtype: str = "f32",
) -> Encoder:
    e = Encoder(seed, TensorType.from_name(dtype))
    e.keys = {
        "projector_type": "idefics3",
        "use_gelu": True,
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
        "vision.projector.scale_factor": cell,
        "vision.preproc_image_size": ALONG * patch * side if longest is None else longest,
    }
    e.values("v.patch_embd.weight", (n_embd, 3, patch, patch), 1 / (patch * 3**0.5))
    e.values("v.patch_embd.bias", (n_embd,), 0.2)
    e.values("v.position_embd.weight", (side**2, n_embd), 0.5)
    add_layers(e, n_layers, n_embd, n_ff, swapped=swapped)
    e.norm("v.post_ln", n_embd)
    e.matrix("mm.model.fc.weight", n_text, n_embd * cell**2)
    return e
