"""Tiny random projector files as llama.cpp's converter writes them (architecture ``clip``), beside tiny models of text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from puna.gguf.types import TensorType
from puna.gguf.writer import GGUFWriter
from tests.tiny import RandomWeights


def write_projector(
    path: str | Path,
    kind: str,
    *,
    n_text: int,
    seed: int = 0,
    dtype: str = "f32",
    n_layers: int = 3,
    n_embd: int = 64,
    n_heads: int = 4,
    n_ff: int = 96,
    image_size: int = 56,
    patch_size: int = 14,
    class_token: bool = False,
    pre_norm: bool = False,
    post_norm: bool = True,
    metadata: dict[str, Any] | None = None,
    n_stored: int | None = None,
) -> Path:
    """A plain stack of attention over patches, and a projector to *n_text* values: ``gemma3``, ``mlp`` or ``janus_pro``.

    *metadata* has further keys, or other values; *n_stored* layers are in the file, whatever it says.
    """
    writer = GGUFWriter("clip")
    stated: dict[str, Any] = {
        "general.name": f"tiny {kind} projector seed {seed}",
        "clip.has_vision_encoder": True,
        "clip.projector_type": kind,
        "clip.use_gelu": True,
        "clip.vision.image_size": image_size,
        "clip.vision.patch_size": patch_size,
        "clip.vision.embedding_length": n_embd,
        "clip.vision.feed_forward_length": n_ff,
        "clip.vision.projection_dim": n_text,
        "clip.vision.block_count": n_layers,
        "clip.vision.attention.head_count": n_heads,
        "clip.vision.attention.layer_norm_epsilon": 1e-6,
        "clip.vision.image_mean": [0.5, 0.5, 0.5],
        "clip.vision.image_std": [0.5, 0.5, 0.5],
    }
    for key, value in (stated | (metadata or {})).items():
        writer.add(key, value)
    w = RandomWeights(writer, seed, TensorType.from_name(dtype))
    plain = RandomWeights(writer, seed + 1, TensorType.F32)

    n_positions = (image_size // patch_size) ** 2 + class_token
    kernel = w.random.standard_normal((n_embd, 3, patch_size, patch_size)) / math.sqrt(3) / patch_size
    writer.add_tensor("v.patch_embd.weight", kernel.astype(np.float32))
    w.bias("v.patch_embd.bias", n_embd)
    plain.matrix("v.position_embd.weight", n_positions, n_embd, std=0.5)
    if class_token:
        w.bias("v.class_embd", n_embd)
    for name in ["v.pre_ln"] * pre_norm + ["v.post_ln"] * post_norm:
        w.norm(f"{name}.weight", n_embd)
        w.bias(f"{name}.bias", n_embd)
    for layer in range(n_layers if n_stored is None else n_stored):
        prefix = f"v.blk.{layer}"
        shapes = {name: (n_embd, n_embd) for name in ("attn_q", "attn_k", "attn_v", "attn_out")}
        shapes |= {"ffn_up": (n_ff, n_embd), "ffn_down": (n_embd, n_ff)}
        for name, (n_out, n_in) in shapes.items():
            w.matrix(f"{prefix}.{name}.weight", n_out, n_in)
            w.bias(f"{prefix}.{name}.bias", n_out)
        for name in ("ln1", "ln2"):
            w.norm(f"{prefix}.{name}.weight", n_embd)
            w.bias(f"{prefix}.{name}.bias", n_embd)
    if kind == "gemma3":
        # The converter leaves this matrix as the checkpoint has it: [n_embd, n_text] rows by columns.
        plain.matrix("mm.input_projection.weight", n_embd, n_text, std=1 / math.sqrt(n_embd))
        w.norm("mm.soft_emb_norm.weight", n_embd)
    else:
        second = "mm.1" if kind == "janus_pro" else "mm.2"
        for name, n_in in (("mm.0", n_embd), (second, n_text)):
            w.matrix(f"{name}.weight", n_text, n_in)
            w.bias(f"{name}.bias", n_text)
    writer.write(path)
    return Path(path)


def write_listener(
    path: str | Path,
    *,
    n_text: int,
    seed: int = 0,
    n_layers: int = 2,
    n_embd: int = 32,
    n_heads: int = 2,
    n_mel: int = 80,
    n_stacked: int = 4,
) -> Path:
    """An ``ultravox`` projector: Whisper's encoder, four of its rows at once through an MLP with a gate.

    With eight libmtmd counts one row less than it gives, and ends the process.
    """
    writer = GGUFWriter("clip")
    n_ff, n_hidden = 2 * n_embd, 48
    for key, value in {
        "general.name": f"tiny ultravox projector seed {seed}",
        "clip.has_audio_encoder": True,
        "clip.projector_type": "ultravox",
        "clip.audio.num_mel_bins": n_mel,
        "clip.audio.embedding_length": n_embd,
        "clip.audio.feed_forward_length": n_ff,
        "clip.audio.projection_dim": n_text,
        "clip.audio.block_count": n_layers,
        "clip.audio.attention.head_count": n_heads,
        "clip.audio.attention.layer_norm_epsilon": 1e-5,
        "clip.audio.projector.stack_factor": n_stacked,
    }.items():
        writer.add(key, value)
    w = RandomWeights(writer, seed, TensorType.F32)
    for name, n_in in (("a.conv1d.1", n_mel), ("a.conv1d.2", n_embd)):
        kernel = w.random.standard_normal((n_embd, n_in, 3)) / math.sqrt(3 * n_in)
        writer.add_tensor(f"{name}.weight", kernel.astype(np.float16))
        writer.add_tensor(f"{name}.bias", (0.1 * w.random.standard_normal((n_embd, 1))).astype(np.float32))
    w.matrix("a.position_embd.weight", 1500, n_embd, std=0.5)
    for layer in range(n_layers):
        prefix = f"a.blk.{layer}"
        shapes = {name: (n_embd, n_embd) for name in ("attn_q", "attn_k", "attn_v", "attn_out")}
        shapes |= {"ffn_up": (n_ff, n_embd), "ffn_down": (n_embd, n_ff)}
        for name, (n_out, n_in) in shapes.items():
            w.matrix(f"{prefix}.{name}.weight", n_out, n_in)
            if name != "attn_k":
                w.bias(f"{prefix}.{name}.bias", n_out)
        for name in ("ln1", "ln2"):
            w.norm(f"{prefix}.{name}.weight", n_embd)
            w.bias(f"{prefix}.{name}.bias", n_embd)
    w.norm("a.post_ln.weight", n_embd)
    w.bias("a.post_ln.bias", n_embd)
    w.norm("mm.a.norm_pre.weight", n_stacked * n_embd)
    w.matrix("mm.a.mlp.1.weight", 2 * n_hidden, n_stacked * n_embd)
    w.norm("mm.a.norm_mid.weight", n_hidden)
    w.matrix("mm.a.mlp.2.weight", n_text, n_hidden)
    writer.write(path)
    return Path(path)
