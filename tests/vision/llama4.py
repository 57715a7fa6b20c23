"""Tiny models with Llama 4's eyes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from puna.gguf.types import TensorType
from tests.models.llama4 import write_llama4
from tests.vision.files import Encoder, add_tokens

TOKENS = ["<|image_start|>", "<|image|>", "<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>", "<|image_end|>"]
MARKS = TOKENS[1:2] + TOKENS[3:5]  # between and behind tiles
TILE = 128


def write_text(path: Path, **options: Any) -> Path:
    return add_tokens(write_llama4(path, **{"seed": 5, **options}), TOKENS)


def encoder(
    *,
    seed: int = 3,
    n_layers: int = 3,
    n_embd: int = 96,
    n_heads: int = 3,
    n_ff: int = 160,
    patch: int = 16,
    tile: int = TILE,
    cell: int = 2,
    n_adapter: tuple[int, int] = (192, 160),
    n_text: int = 256,
    dtype: str = "f32",
) -> Encoder:
    e = Encoder(seed, TensorType.from_name(dtype))
    side = tile // patch
    e.keys = {
        "projector_type": "llama4",
        "use_gelu": True,
        "vision.image_size": tile,
        "vision.patch_size": patch,
        "vision.embedding_length": n_embd,
        "vision.feed_forward_length": n_ff,
        "vision.block_count": n_layers,
        "vision.attention.head_count": n_heads,
        "vision.attention.layer_norm_epsilon": 1e-5,
        "vision.projection_dim": n_text,
        "vision.image_mean": [0.5, 0.5, 0.5],
        "vision.image_std": [0.5, 0.5, 0.5],
        "vision.projector.scale_factor": cell,
    }
    e.matrix("v.patch_embd.weight", n_embd, 3 * patch**2)
    e.values("v.class_embd", (n_embd,))
    e.values("v.position_embd.weight", (side**2 + 1, n_embd), 0.5)
    e.norm("v.pre_ln", n_embd)
    for i in range(n_layers):
        prefix = f"v.blk.{i}"
        for name in ("ln1", "ln2"):
            e.norm(f"{prefix}.{name}", n_embd)
        for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
            e.linear(f"{prefix}.{name}", n_embd, n_embd)
        e.linear(f"{prefix}.ffn_up", n_ff, n_embd)
        e.linear(f"{prefix}.ffn_down", n_embd, n_ff)
    e.norm("v.post_ln", n_embd)
    e.linear("mm.model.mlp.1", n_adapter[0], cell**2 * n_embd, bias=False, gain=1.5)
    e.linear("mm.model.mlp.2", n_adapter[1], n_adapter[0], bias=False, gain=1.5)
    e.linear("mm.model.fc", n_text, n_adapter[1], bias=False, gain=1.5)
    return e


RENAMED = {
    r"^v\.patch_embd": "v.patch_embedding",
    r"^v\.class_embd": "v.class_embedding",
    r"^v\.position_embd\.weight": "v.positional_embedding_vlm",
    r"^v\.pre_ln": "v.layernorm_pre",
    r"^v\.post_ln": "v.layernorm_post",
    r"\.ln1\.": ".attn_norm.",
    r"\.ln2\.": ".ffn_norm.",
    r"attn_out\.": "attn_output.",
    r"ffn_up": "mlp.fc1",
    r"ffn_down": "mlp.fc2",
    r"^mm\.model\.mlp\.(\d)": r"v.vision_adapter.mlp.fc\1",
    r"^mm\.model\.fc": "mm.linear_1",
}


def save_as_one(e: Encoder, text: Path, path: Path) -> Path:
    """As the ancestor's converter does."""
    names = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count", "image_size", "patch_size")
    keys = {f"vision.{name}": e.keys[f"vision.{name}"] for name in names}
    keys |= {"vision.rope.freq_base": 10000.0, "vision.layer_norm_epsilon": 1e-5}
    keys |= {"vision.pixel_shuffle_ratio": 1 / e.keys["vision.projector.scale_factor"]}
    return e.save_with(text, path, rename=RENAMED, keys=keys)


Floats = npt.NDArray[np.float32]


def row_by_row(rows: Floats) -> Floats:
    """Those of tiles of 4 x 4, which libmtmd has column by column."""
    return rows.reshape(-1, 4, 4, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def tiles(ours: Floats, theirs: Floats, _encoder: Encoder) -> tuple[Floats, Floats]:
    """Without the whole image, where there are several: libmtmd resizes it by another filter."""
    n = len(ours) if len(ours) == 16 else len(ours) - 16
    return ours[:n], row_by_row(theirs)[:n]
