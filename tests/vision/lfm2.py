"""Tiny models with LFM2-VL's eyes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from puna.gguf.types import TensorType
from tests.models.lfm2 import write_lfm2
from tests.vision.files import Encoder, add_tokens
from tests.vision.gemma3 import add_layers

N_EMBD_TEXT = 256
GRIDS = [(row, column) for row in range(1, 11) for column in range(1, 11) if row * column <= 10]
TOKENS = ["<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", *(f"<|img_row_{r}_col_{c}|>" for r, c in GRIDS)]


def write_text(path: Path, **options: Any) -> Path:
    return add_tokens(write_lfm2(path, **options), TOKENS)


def encoder(
    *,
    seed: int = 7,
    n_layers: int = 2,
    n_embd: int = 48,
    n_heads: int = 3,
    n_ff: int = 80,
    side: int = 16,
    norm: bool = True,
    n_text: int = N_EMBD_TEXT,
    dtype: str = "f32",
) -> Encoder:
    """Positions are learned for *side* x *side* patches of 16 pixels, of which two by two are merged."""
    e = Encoder(seed, TensorType.from_name(dtype))
    patch, cell = 16, 2
    e.keys = {
        "projector_type": "lfm2",
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
    }
    e.values("v.patch_embd.weight", (n_embd, 3, patch, patch), 1 / (patch * 3**0.5))
    e.values("v.patch_embd.bias", (n_embd,), 0.2)
    e.values("v.position_embd.weight", (side**2, n_embd), 0.5)
    add_layers(e, n_layers, n_embd, n_ff)
    e.norm("v.post_ln", n_embd)
    if norm:
        e.norm("mm.input_norm", n_embd * cell**2)
    e.linear("mm.1", 320, n_embd * cell**2)
    e.linear("mm.2", n_text, 320)
    return e


def save_as_one(e: Encoder, text: Path, path: Path, **keys: Any) -> Path:
    """As the ancestor's converter does; *keys* of ``vision.``."""
    has_norm = "mm.input_norm.weight" in e.tensors
    stated = {key: value for key, value in e.keys.items() if key.startswith("vision.") and key != "vision.projection_dim"}
    stated |= {
        "vision.num_channels": 3,
        "vision.projector.use_layernorm": has_norm,
        "vision.do_image_splitting": True,
        "vision.min_tiles": 2,
        "vision.max_tiles": 10,
        "vision.tile_size": 512,
        "vision.min_image_tokens": 64,
        "vision.max_image_tokens": 256,
        "vision.max_pixels_tolerance": 2.0,
        "vision.use_thumbnail": True,
        "vision.use_image_special_tokens": True,
        "vision.image_token_id": 0,
    }
    stated |= {f"vision.{key}": value for key, value in keys.items()}
    return e.save_with(text, path, rename={r"^mm\.input_norm": "mm.layer_norm"}, keys=stated)
