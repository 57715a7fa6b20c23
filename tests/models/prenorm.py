"""Files of the families that vary Llama's stack of layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.models.row import TinyFile

# The bound of rows whose heads are wider than 64: flash attention sums more values in F16 there, and an error of 1.2e-3 of
# the largest logit is met with weights in F16.
WIDE_HEADS = 2e-3


def write_prenorm(
    path: Path,
    architecture: str,
    *,
    n_layers: int = 3,
    n_heads: int = 4,
    n_kv_heads: int = 2,
    head_dim: int = 64,
    n_ff: int = 512,
    tied: bool = False,
    biases: tuple[str, ...] = (),
    query_key_norms: bool = False,
    packed_qkv: bool = False,
    packed_mlp: bool = False,
    gated: bool = True,
    norm_biases: bool = False,
    n_experts: int = 0,
    n_used: int = 3,
    n_ff_expert: int = 256,
    n_ff_shared: int = 0,
    shared_gate: bool = False,
    rope_factors: bool = False,
    **options: Any,
) -> Path:
    """*biases* names the matrices that have one; *rope_factors* writes LongRoPE's two sets."""
    stated: dict[str, Any] = {"expert_shared_feed_forward_length": n_ff_shared or None}
    if n_experts:
        stated |= {"expert_count": n_experts, "expert_used_count": n_used, "expert_feed_forward_length": n_ff_expert}
    if head_dim * n_heads != 256:
        stated |= {"attention__key_length": head_dim, "attention__value_length": head_dim}
    file = TinyFile(architecture, n_layers=n_layers, n_heads=n_heads, n_kv_heads=n_kv_heads, n_ff=n_ff, **{**stated, **options})
    n, q, kv = file.n_embd, n_heads * head_dim, n_kv_heads * head_dim
    file.ends(tied=tied, norm_bias=norm_biases)
    inner = {"attn_qkv": (q + 2 * kv, n)} if packed_qkv else {"attn_q": (q, n), "attn_k": (kv, n), "attn_v": (kv, n)}
    outer = {"attn_output": ((n, q), 2.0)}
    if not n_experts:
        inner |= {"ffn_up": (2 * n_ff if packed_mlp else n_ff, n)} | ({"ffn_gate": (n_ff, n)} if gated and not packed_mlp else {})
        outer |= {"ffn_down": ((n, n_ff), 3.0)}
    if n_ff_shared:
        inner |= {"ffn_gate_shexp": (n_ff_shared, n), "ffn_up_shexp": (n_ff_shared, n)}
        outer |= {"ffn_down_shexp": ((n, n_ff_shared), 3.0)}
    for i in range(n_layers):
        prefix = f"blk.{i}"
        file.norms(prefix, "attn_norm", "ffn_norm", biases=norm_biases)
        file.norms(prefix, *["attn_q_norm", "attn_k_norm"] * query_key_norms, n=head_dim)
        for name, (shape, gain) in ({name: (shape, 1.0) for name, shape in inner.items()} | outer).items():
            file.matrices(prefix, {name: shape}, biases=name in biases, gain=gain)
        if n_experts:
            file.experts(prefix, n_experts=n_experts, n_ff=n_ff_expert)
        if shared_gate:
            values = 2 * file.weights.random.standard_normal(n) / np.sqrt(n)
            file.writer.add_tensor(f"{prefix}.ffn_gate_inp_shexp.weight", values.astype(np.float32))
    if rope_factors:
        _add_longrope(file, int(options.get("rope__dimension_count", head_dim)) // 2)
    return file.save(path)


def _add_longrope(file: TinyFile, n_pairs: int) -> None:
    for name, most in (("long", 16.0), ("short", 2.0)):
        file.writer.add_tensor(f"rope_factors_{name}.weight", np.linspace(1.0, most, n_pairs, dtype=np.float32))
