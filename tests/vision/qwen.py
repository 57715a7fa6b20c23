"""Tiny models with the eyes of Qwen's families."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from puna.gguf.types import TensorType, ValueType
from tests.models.dialect import Translation
from tests.models.table import ROWS
from tests.vision.files import Encoder, add_tokens

TOKENS = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]


def write_text(path: Path, architecture: str, **options: Any) -> Path:
    return add_tokens(ROWS[architecture].write(path, **{"seed": 5, **options}), TOKENS)


def encoder25(
    *,
    seed: int = 3,
    n_layers: int = 4,
    n_embd: int = 96,
    n_heads: int = 3,
    n_ff: int = 160,
    patch: int = 14,
    pattern: int = 2,
    n_text: int = 256,
    dtype: str = "f32",
    is_first: bool = False,
) -> Encoder:
    """Every *pattern*-th layer sees everything; *is_first*: of Qwen 2-VL, where all do."""
    e = Encoder(seed, TensorType.from_name(dtype))
    e.keys = {
        "projector_type": "qwen2.5vl_merger",
        "use_silu": True,
        "vision.image_size": 560,
        "vision.patch_size": patch,
        "vision.embedding_length": n_embd,
        "vision.feed_forward_length": n_ff,
        "vision.block_count": n_layers,
        "vision.attention.head_count": n_heads,
        "vision.attention.layer_norm_epsilon": 1e-6,
        "vision.projection_dim": n_text,
        "vision.image_mean": [0.48145466, 0.4578275, 0.40821073],
        "vision.image_std": [0.26862954, 0.26130258, 0.27577711],
        "vision.n_wa_pattern": pattern,
    }
    for name in ("v.patch_embd.weight", "v.patch_embd.weight.1"):
        e.values(name, (n_embd, 3, patch, patch), 0.7 / (patch * 3**0.5))
    for i in range(n_layers):
        prefix = f"v.blk.{i}"
        for name in ("ln1", "ln2"):
            e.norm(f"{prefix}.{name}", n_embd, bias=is_first)
        for name in ("attn_q", "attn_k", "attn_v"):
            e.linear(f"{prefix}.{name}", n_embd, n_embd)
        e.linear(f"{prefix}.attn_out", n_embd, n_embd)
        for name in ("ffn_up",) if is_first else ("ffn_gate", "ffn_up"):
            e.linear(f"{prefix}.{name}", n_ff, n_embd)
        e.linear(f"{prefix}.ffn_down", n_embd, n_ff)
    if is_first:
        e.keys |= {"projector_type": "qwen2vl_merger", "use_silu": False}
        del e.keys["vision.n_wa_pattern"]
    e.norm("v.post_ln", n_embd, bias=is_first)
    e.linear("mm.0", 4 * n_embd, 4 * n_embd)
    e.linear("mm.2", n_text, 4 * n_embd)
    return e


OF_ANCESTOR = ("block_count", "embedding_length", "attention.head_count", "patch_size", "attention.layer_norm_epsilon")

RENAMED25 = {
    r"^v\.patch_embd\.weight\.1$": "v.patch_embd_1.weight",
    r"^v\.patch_embd\.weight$": "v.patch_embd_0.weight",
    r"^v\.post_ln": "v.merger.ln_q",
    r"^mm\.": "v.merger.mlp.",
}


def save25_as_one(e: Encoder, text: Path, path: Path) -> Path:
    """As the ancestor's converter does."""
    keys = {f"vision.{name}": e.keys[f"vision.{name}"] for name in OF_ANCESTOR}
    pattern, n_layers = e.keys["vision.n_wa_pattern"], e.keys["vision.block_count"]
    keys |= {
        "vision.num_channels": 3,
        "vision.spatial_merge_size": 2,
        "vision.spatial_patch_size": e.keys["vision.patch_size"],
        "vision.window_size": 112,
        "vision.rope.freq_base": 10000.0,
        "vision.fullatt_block_indexes": [i for i in range(n_layers) if (i + 1) % pattern == 0],
        "vision.temporal_patch_size": 2,
    }
    return e.save_with(_of_ancestor(text, "qwen25vl", "rope.mrope_section"), path, rename=RENAMED25, keys=keys)


def _of_ancestor(text: Path, architecture: str, sections: str) -> Path:
    file = Translation(text)
    values, _ = file.values.pop("rope.dimension_sections")
    file.values[sections] = values[:3], ValueType.INT32
    file.others["general.architecture"] = architecture, None
    return file.save(text.with_suffix(f".{architecture}"), architecture)


def encoder3(
    *,
    seed: int = 3,
    n_layers: int = 4,
    n_embd: int = 96,
    n_heads: int = 3,
    n_ff: int = 160,
    patch: int = 16,
    side: int = 9,
    deepstack: tuple[int, ...] = (1, 2),
    n_text: int = 256,
    dtype: str = "f32",
) -> Encoder:
    """Positions are learned for *side* x *side* patches; the layers *deepstack* give something beside the last."""
    e = Encoder(seed, TensorType.from_name(dtype))
    e.keys = {
        "projector_type": "qwen3vl_merger",
        "use_gelu": True,
        "vision.image_size": 768,
        "vision.patch_size": patch,
        "vision.embedding_length": n_embd,
        "vision.feed_forward_length": n_ff,
        "vision.block_count": n_layers,
        "vision.attention.head_count": n_heads,
        "vision.attention.layer_norm_epsilon": 1e-6,
        "vision.projection_dim": n_text,
        "vision.image_mean": [0.5, 0.5, 0.5],
        "vision.image_std": [0.5, 0.5, 0.5],
        "vision.spatial_merge_size": 2,
        "vision.is_deepstack_layers": [i in deepstack for i in range(n_layers)],
    }
    for name in ("v.patch_embd.weight", "v.patch_embd.weight.1"):
        e.values(name, (n_embd, 3, patch, patch), 0.7 / (patch * 3**0.5))
    e.values("v.patch_embd.bias", (n_embd,), 0.2)
    e.values("v.position_embd.weight", (side**2, n_embd), 0.5)
    for i in range(n_layers):
        prefix = f"v.blk.{i}"
        for name in ("ln1", "ln2"):
            e.norm(f"{prefix}.{name}", n_embd)
        e.linear(f"{prefix}.attn_qkv", 3 * n_embd, n_embd)
        e.linear(f"{prefix}.attn_out", n_embd, n_embd)
        e.linear(f"{prefix}.ffn_up", n_ff, n_embd)
        e.linear(f"{prefix}.ffn_down", n_embd, n_ff)
    for i in deepstack:
        e.norm(f"v.deepstack.{i}.norm", 4 * n_embd)
        e.linear(f"v.deepstack.{i}.fc1", 4 * n_embd, 4 * n_embd)
        e.linear(f"v.deepstack.{i}.fc2", n_text, 4 * n_embd)
    e.norm("v.post_ln", n_embd)
    e.linear("mm.0", 4 * n_embd, 4 * n_embd)
    e.linear("mm.2", n_text, 4 * n_embd)
    return e


def save3_as_one(e: Encoder, text: Path, path: Path, architecture: str = "qwen3vl", stated: Sequence[int] = ()) -> Path:
    """As the ancestor's converter does: queries, keys and values apart, both frames in one matrix."""
    one = Encoder(kind=e.kind, tensors=dict(e.tensors))
    names = [*OF_ANCESTOR, "image_mean", "image_std", "spatial_merge_size"]
    layers = [i for i, is_given in enumerate(e.keys["vision.is_deepstack_layers"]) if is_given]
    keys = {f"vision.{name}": e.keys[f"vision.{name}"] for name in names}
    keys |= {"vision.num_channels": 3, "vision.rope.freq_base": 10000.0, "vision.temporal_patch_size": 2}
    keys |= {"vision.shortest_edge": 65536, "vision.longest_edge": 16777216}
    keys |= {"vision.deepstack_visual_indexes": stated or layers} if layers else {}
    for name in list(one.tensors):
        if "attn_qkv" in name:
            for part, values in zip("qkv", np.split(one.tensors.pop(name), 3), strict=True):
                one.tensors[name.replace("attn_qkv", f"attn_{part}")] = values
    frames = np.stack([one.tensors.pop(name) for name in ("v.patch_embd.weight", "v.patch_embd.weight.1")], 2)
    one.tensors["v.patch_embed.weight"] = frames.reshape(-1, *frames.shape[2:])
    rename = {r"^v\.patch_embd\.": "v.patch_embed.", r"^v\.position_embd": "v.pos_embed", r"\.ln(\d)\.": r".norm\1."}
    rename |= {r"^v\.post_ln": "v.merger.norm", r"^mm\.0": "v.merger.linear_fc1", r"^mm\.2": "v.merger.linear_fc2"}
    rename |= {r"ffn_up": "mlp.linear_fc1", r"ffn_down": "mlp.linear_fc2", r"\.fc(\d)\.": r".linear_fc\1."}
    rename |= {rf"^v\.deepstack\.{layer}\.": f"v.deepstack_merger.{i}." for i, layer in enumerate(layers)}
    return one.save_with(_of_ancestor(text, architecture, "mrope_sections"), path, rename=rename, keys=keys)
