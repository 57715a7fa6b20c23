"""Tiny models with Gemma 4's eyes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from puna.gguf.types import TensorType
from tests.models.gemma4 import write_gemma4
from tests.vision.files import Encoder, add_tokens

MATRICES = ("attn_q", "attn_k", "attn_v", "attn_out", "ffn_gate", "ffn_up", "ffn_down")
BOUNDS = ("input_min", "input_max", "output_min", "output_max")
N_EMBD_TEXT = 128
TOKENS = ["<|image>", "<image|>"]


def write_text(path: Path, **options: Any) -> Path:
    """A large one. An image fits in a window, as in all sizes that were published; else libmtmd cuts what its rows see."""
    stated = {"seed": 5, "given": False, "n_shared": 0, "attention__sliding_window": 320, **options}
    return add_tokens(write_gemma4(path, **stated), TOKENS)


def encoder(
    *,
    seed: int = 3,
    n_layers: int = 3,
    n_embd: int = 96,
    n_heads: int = 3,
    n_ff: int = 160,
    patch: int = 16,
    cell: int = 2,
    n_places: int = 600,
    clamped: bool = True,
    standardised: bool = True,
    n_text: int = N_EMBD_TEXT,
    dtype: str = "f32",
) -> Encoder:
    e = Encoder(seed, TensorType.from_name(dtype))
    e.keys = {
        "projector_type": "gemma4v",
        "use_gelu": True,
        "vision.image_size": 224,
        "vision.patch_size": patch,
        "vision.embedding_length": n_embd,
        "vision.feed_forward_length": n_ff,
        "vision.block_count": n_layers,
        "vision.attention.head_count": n_heads,
        "vision.attention.layer_norm_epsilon": 1e-6,
        "vision.projection_dim": n_text,
        "vision.image_mean": [0.0, 0.0, 0.0],
        "vision.image_std": [1.0, 1.0, 1.0],
        "vision.projector.scale_factor": cell,
    }
    e.values("v.patch_embd.weight", (n_embd, 3, patch, patch), 1 / (patch * 3**0.5))
    e.values("v.position_embd.weight", (2, n_places, n_embd), 0.5)
    for i in range(n_layers):
        prefix, head_dim = f"v.blk.{i}", n_embd // n_heads
        for name in ("ln1", "attn_post_norm", "ln2", "ffn_post_norm"):
            e.norm(f"{prefix}.{name}", n_embd, bias=False)
        # Products are not scaled down: short queries keep attention from picking one key.
        e.values(f"{prefix}.attn_q_norm.weight", (head_dim,), 0.1 * head_dim**-0.5, head_dim**-0.5)
        e.norm(f"{prefix}.attn_k_norm", head_dim, bias=False)
        for name in MATRICES:
            n_in, n_out = {"ffn_down": (n_ff, n_embd), "ffn_gate": (n_embd, n_ff), "ffn_up": (n_embd, n_ff)}.get(
                name, (n_embd, n_embd)
            )
            e.linear(f"{prefix}.{name}", n_out, n_in, bias=False)
            if clamped:
                _bound(e, f"{prefix}.{name}")
        e.values(f"{prefix}.out_scale.weight", (1,), 0.1, 0.8)
    if standardised:
        e.values("v.std_bias", (n_embd,), 0.5)
        e.values("v.std_scale", (n_embd,), 0.1, 1.0)
    e.linear("mm.input_projection", n_text, n_embd, bias=False)
    return e


def _bound(e: Encoder, name: str) -> None:
    """So that some values of either are cut off."""
    for bound, at in zip(BOUNDS, e.random.uniform(1.5, 2.5, 4), strict=True):
        e.tensors[f"{name}.{bound}"] = np.array([at if bound.endswith("max") else -at], np.float32)


def save_as_one(e: Encoder, text: Path, path: Path) -> Path:
    """As the ancestor's converter does: the bounds of all matrices in one tensor."""
    keys = {key: value for key, value in e.keys.items() if key.startswith("vision.") and "image_" not in key}
    del keys["vision.projection_dim"]
    one = Encoder(kind=e.kind, tensors=dict(e.tensors))
    names = [f"v.blk.{i}.{name}" for i in range(e.keys["vision.block_count"]) for name in MATRICES] + ["mm.input_projection"]
    if "v.blk.0.attn_q.input_min" in one.tensors:
        numbers = [one.tensors.pop(f"{name}.{bound}", np.zeros(1, np.float32)) for name in names for bound in BOUNDS]
        one.tensors["v.clamp_data"] = np.concatenate(numbers)
    return one.save_with(text, path, rename={}, keys={**keys, "vision.num_channels": 3})
