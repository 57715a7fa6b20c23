"""Tiny models with Gemma 3's eyes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from puna.gguf.types import TensorType
from tests.tiny import write_gemma3
from tests.vision.files import Encoder, add_tokens

N_EMBD_TEXT = 128
TOKENS = ["<start_of_image>", "<end_of_image>"]


def write_text(path: Path, **options: Any) -> Path:
    return add_tokens(write_gemma3(path, **options), TOKENS, plain=["\n\n"])


def encoder(
    *,
    seed: int = 3,
    n_layers: int = 3,
    n_embd: int = 72,
    n_heads: int = 3,
    n_ff: int = 112,
    patch: int = 14,
    side: int = 12,
    cell: int = 4,
    n_text: int = N_EMBD_TEXT,
    dtype: str = "f32",
    swapped: bool = False,
) -> Encoder:
    """Of *side* x *side* patches, *cell* x *cell* of which become a row. *swapped*: names as older files have them."""
    e = Encoder(seed, TensorType.from_name(dtype))
    e.keys = {
        "projector_type": "gemma3",
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
    add_layers(e, n_layers, n_embd, n_ff, swapped=swapped)
    e.norm("v.post_ln", n_embd)
    e.norm("mm.soft_emb_norm", n_embd, bias=False)
    e.matrix("mm.input_projection.weight", n_embd, n_text)  # as the checkpoint has it: rows are what comes in
    return e


def add_layers(e: Encoder, n_layers: int, n_embd: int, n_ff: int, *, swapped: bool = False) -> None:
    """Of a SigLIP."""
    up, down = ("ffn_down", "ffn_up") if swapped else ("ffn_up", "ffn_down")
    for i in range(n_layers):
        prefix = f"v.blk.{i}"
        e.norm(f"{prefix}.ln1", n_embd)
        e.norm(f"{prefix}.ln2", n_embd)
        for name in ("attn_q", "attn_k", "attn_v"):
            e.linear(f"{prefix}.{name}", n_embd, n_embd)
        e.linear(f"{prefix}.attn_out", n_embd, n_embd)
        e.linear(f"{prefix}.{up}", n_ff, n_embd)
        e.linear(f"{prefix}.{down}", n_embd, n_ff)


RENAMED = {
    r"^v\.patch_embd": "v.patch_embedding",
    r"^v\.position_embd": "v.position_embedding",
    r"^v\.post_ln": "v.post_layernorm",
    r"\.ln(\d)\.": r".layer_norm\1.",
    r"attn_out\.": "attn_output.",
    r"ffn_up": "mlp.fc1",
    r"ffn_down": "mlp.fc2",
    r"^mm\.": "mm.mm_",
}


def save_as_one(e: Encoder, text: Path, path: Path) -> Path:
    """As the ancestor's converter does."""
    keys = {key: value for key, value in e.keys.items() if key.startswith("vision.") and "image_" not in key}
    side = e.keys["vision.image_size"] // e.keys["vision.patch_size"]
    del keys["vision.projection_dim"]
    cell = keys.pop("vision.projector.scale_factor")
    keys |= {"vision.image_size": e.keys["vision.image_size"], "vision.num_channels": 3}
    return e.save_with(text, path, rename=RENAMED, keys={**keys, "mm.tokens_per_image": (side // cell) ** 2})
