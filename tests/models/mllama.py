"""Llama 3.2 Vision: tiny files, in one as the ancestor has it, or with the eyes in a file of their own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from puna.gguf.types import TensorType, ValueType
from puna.gguf.writer import GGUFWriter
from tests.models.dialect import Translation
from tests.models.row import Row, TinyFile
from tests.tiny import RandomWeights

IMAGE = "<|image|>"

# What the eyes are unless something else is said; patches are fewer than real ones, and of them and a class token there are
# never a multiple of 8, as of real ones.
EYES: dict[str, Any] = {
    "image_size": 42,
    "patch_size": 14,
    "n_vision": 64,
    "n_vision_heads": 4,
    "n_vision_ff": 96,
    "n_local": 4,
    "n_global": 2,
    "taken": [1, 3],  # the states before these layers are a part of what is given
    "max_tiles": 4,
}


def write_mllama(
    path: Path,
    *,
    seed: int = 0,
    looks: list[int] | None = None,
    n_layers: int = 5,
    dtype: str = "f32",
    n_silent: int = 0,
    n_padding: int = 0,
    rope_freqs: bool = True,
    tied: bool = False,
    eyes: bool = True,
    gates: float = 1.0,
    **changes: Any,
) -> Path:
    """The layers *looks* look at images. The last *n_silent* tokens have an embedding and no row of the head, nor have the
    *n_padding* rows of the embedding that are no token's. *gates* is how large the gates are; *changes* are of EYES.
    """
    looks = [1, 3] if looks is None else looks
    o = EYES | changes
    stated: dict[str, Any] = {"attention.cross_attention_layers": np.array(looks, np.int32)}
    file = TinyFile("mllama", seed=seed, dtype=dtype, n_layers=n_layers, marks=[IMAGE], **stated)
    n, head_dim, n_kv = file.n_embd, 64, 128
    w, plain = file.weights, RandomWeights(file.writer, seed + 1, TensorType.F32)
    n_rows, n_head = file.n_vocab + n_padding, file.n_vocab - n_silent
    w.matrix("token_embd.weight", n_rows, n, std=3.0 / n**0.5 if tied else 1.0)
    w.norm("output_norm.weight", n, random_signs=tied)
    if not tied:
        w.matrix("output.weight", n_head, n, std=3.0 / n**0.5)
    if rope_freqs:
        file.writer.add_tensor("rope_freqs.weight", np.linspace(1.0, 8.0, head_dim // 2, dtype=np.float32))
    for i in range(n_layers):
        prefix = f"blk.{i}"
        file.norms(prefix, "attn_norm", "ffn_norm")
        if i in looks:
            file.matrices(prefix, {"cross_attn_q_proj": (n, n), "cross_attn_k_proj": (n_kv, n), "cross_attn_v_proj": (n_kv, n)})
            file.matrices(prefix, {"cross_attn_o_proj": (n, n)}, gain=2.0)
            file.norms(prefix, "cross_attn_q_norm", "cross_attn_k_norm", n=head_dim)
            for name in ("cross_attn_attn_gate", "cross_attn_mlp_gate"):
                file.writer.add_tensor(f"{prefix}.{name}", (gates * plain.random.uniform(0.3, 1, 1)).astype(np.float32))
        else:
            file.matrices(prefix, {"attn_q": (n, n), "attn_k": (n_kv, n), "attn_v": (n_kv, n)})
            file.matrices(prefix, {"attn_output": (n, n)}, gain=2.0)
        file.mlp(prefix, n_ff=512)
    if eyes:
        add_eyes(file.writer, seed + 2, dtype, n, **o)
    return file.save(path)


def write_eyes(path: Path, *, seed: int = 0, n_text: int = 256, dtype: str = "f32", **changes: Any) -> Path:
    """The eyes alone, as the ancestor's first files had them beside the text's."""
    writer = GGUFWriter("mllama")
    add_eyes(writer, seed + 2, dtype, n_text, **EYES | changes)
    writer.write(path)
    return path


def add_eyes(
    writer: GGUFWriter,
    seed: int,
    dtype: str,
    n_text: int,
    *,
    image_size: int,
    patch_size: int,
    n_vision: int,
    n_vision_heads: int,
    n_vision_ff: int,
    n_local: int,
    n_global: int,
    taken: list[int],
    max_tiles: int,
    swapped: bool = False,
    gated: bool = True,
) -> None:
    """*swapped*: the two matrices of a feed-forward part have each other's names."""
    for key, value in {
        "block_count": n_local,
        "global.block_count": n_global,
        "embedding_length": n_vision,
        "feed_forward_length": n_vision_ff,
        "attention.head_count": n_vision_heads,
        "attention.layer_norm_epsilon": 1e-5,
        "image_size": image_size,
        "patch_size": patch_size,
        "max_num_tiles": max_tiles,
        "num_channels": 3,
    }.items():
        writer.add(f"mllama.vision.{key}", value)
    writer.add("mllama.vision.intermediate_layers_indices", taken, element=ValueType.INT32)
    w, plain = RandomWeights(writer, seed, TensorType.from_name(dtype)), RandomWeights(writer, seed + 1, TensorType.F32)
    n_ratios = len(ratios(max_tiles)) + 1
    n_positions = (image_size // patch_size) ** 2 + 1
    kernel = plain.random.standard_normal((n_vision, 3, patch_size, patch_size)) / (3 * patch_size**2) ** 0.5
    writer.add_tensor("v.patch_embd.weight", kernel.astype(np.float16))
    plain.bias("v.class_embd", n_vision)
    plain.matrix("v.position_embd.weight", n_positions, n_vision, std=0.5)
    plain.matrix("v.tile_position_embd.weight", n_ratios, max_tiles * n_positions * n_vision, std=0.5)
    for name in ("v.pre_tile_position_embd", "v.post_tile_position_embd"):
        plain.matrix(f"{name}.weight", n_ratios, max_tiles * n_vision, std=0.5)
    if gated:
        for name in ("position_embd", "tile_position_embd", "pre_tile_position_embd", "post_tile_position_embd"):
            writer.add_tensor(f"v.{name}.gate", plain.random.uniform(0.3, 1, 1).astype(np.float32))
    for name in ("v.pre_ln", "v.post_ln"):
        _layer_norm(plain, name, n_vision)
    names = ("ffn_down", "ffn_up") if swapped else ("ffn_up", "ffn_down")
    for i in range(n_local):
        _add_layer(w, plain, f"v.blk.{i}", n_vision, n_vision_ff, names)
    for i in range(n_global):
        _add_layer(w, plain, f"v.global.blk.{i}", n_vision, n_vision_ff, names)
        for name in ("attn_gate", "ffn_gate"):
            writer.add_tensor(f"v.global.blk.{i}.{name}", plain.random.uniform(0.3, 1, 1).astype(np.float32))
    w.matrix("mm.0.weight", n_text, n_vision * (1 + len(taken)))
    plain.bias("mm.0.bias", n_text)


def _add_layer(w: RandomWeights, plain: RandomWeights, prefix: str, n: int, n_ff: int, names: tuple[str, str]) -> None:
    for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
        w.matrix(f"{prefix}.{name}.weight", n, n)
    for name, n_out, n_in in ((names[0], n_ff, n), (names[1], n, n_ff)):
        w.matrix(f"{prefix}.{name}.weight", n_out, n_in)
        plain.bias(f"{prefix}.{name}.bias", n_out)
    for name in ("ln1", "ln2"):
        _layer_norm(plain, f"{prefix}.{name}", n)


def ratios(max_tiles: int) -> list[tuple[int, int]]:
    """Rows and columns of tiles that there may be, in the order in which they are numbered from 1 on."""
    return [
        (rows, columns) for rows in range(1, max_tiles + 1) for columns in range(1, max_tiles + 1) if rows * columns <= max_tiles
    ]


def _layer_norm(weights: RandomWeights, name: str, n: int) -> None:
    weights.norm(f"{name}.weight", n)
    weights.bias(f"{name}.bias", n)


def write_blind(path: Path, **options: Any) -> Path:
    """The same as a Llama, which it is where there are no images: without the layers that look at them."""
    options.setdefault("looks", [1, 3])
    file = Translation(write_mllama(path, eyes=False, **options))
    kept = [i for i in range(int(file.values["block_count"][0])) if i not in options["looks"]]
    file.values.pop("attention.cross_attention_layers")
    file.values["block_count"] = len(kept), None
    moved = {}
    for name, tensor in file.tensors.items():
        layer = re.match(r"blk\.(\d+)\.", name)
        if layer is None:
            moved[name] = tensor
        elif int(layer[1]) in kept:
            moved[name.replace(layer[0], f"blk.{kept.index(int(layer[1]))}.")] = tensor
    file.tensors = moved
    return file.save(path, "llama")


MLLAMA = Row(
    models="Llama 3.2 Vision 11B, 90B",
    attends="everything before; every fifth the last image",
    write=write_mllama,
    variants={"f32": {}, "f16": {"dtype": "f16"}, "q8_0": {"dtype": "q8_0"}, "cache-q8_0": {}, "first-looks": {"looks": [0, 2]}},
    norm=write_blind,
    note="llama.cpp does not run it: the same file without the layers that look at images is compared with it, and prompts "
    "with images with arithmetic of its own in the tests, written after the published model",
)
