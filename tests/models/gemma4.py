from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.models.row import WINDOW_AS_BATCH, Row, TinyFile

N_EMBD, N_HEADS, WIDE, NARROW, N_FF, N_GIVEN = 128, 4, 128, 64, 256, 32
N_EXPERTS, N_FF_EXPERT = 8, 64


def write_gemma4(
    path: Path,
    *,
    n_layers: int = 6,
    n_shared: int = 3,
    given: bool = True,
    experts: str = "",
    n_kv_wide: int = 1,
    keys_as_values: bool = False,
    scales: bool = True,
    **options: Any,
) -> Path:
    """Two layers of three have a window and narrow heads; *experts*: "apart" or "packed", gate and up."""
    is_windowed = [(i + 1) % 3 != 0 for i in range(n_layers)]
    stated: dict[str, Any] = {"attention__key_length": WIDE, "attention__value_length": WIDE, "rope__dimension_count": WIDE}
    stated |= {"attention__key_length_swa": NARROW, "attention__value_length_swa": NARROW, "rope__dimension_count_swa": NARROW}
    stated |= {"attention__sliding_window": 48, "attention__sliding_window_pattern": is_windowed}
    stated |= {"attention__shared_kv_layers": n_shared, "embedding_length_per_layer_input": N_GIVEN if given else 0}
    stated |= {"attention__head_count_kv": [2 if w else n_kv_wide for w in is_windowed], "rope__freq_base": 1e6}
    if experts:
        stated |= {"expert_count": N_EXPERTS, "expert_used_count": 3, "expert_feed_forward_length": N_FF_EXPERT}
    sizes = {"n_layers": n_layers, "n_embd": N_EMBD, "n_heads": N_HEADS, "n_ff": N_FF}
    file = TinyFile("gemma4", **{**sizes, **stated, **options})
    file.ends(tied=True)
    factors = np.where(np.arange(WIDE // 2) < WIDE // 4, 1.0, 1e30)  # a quarter of the values rotates
    file.writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    if given:
        file.weights.matrix("per_layer_token_embd.weight", file.n_vocab, N_GIVEN * n_layers, std=N_GIVEN**-0.5)
        file.weights.matrix("per_layer_model_proj.weight", N_GIVEN * n_layers, N_EMBD, std=1.0)
        file.weights.norm("per_layer_proj_norm.weight", N_GIVEN)
    for i, w in enumerate(is_windowed):
        prefix = f"blk.{i}"
        has_values = w or not keys_as_values
        _write_attention(file, prefix, NARROW if w else WIDE, 2 if w else n_kv_wide, i < n_layers - n_shared, has_values)
        file.norms(prefix, "ffn_norm", "post_ffw_norm")
        file.matrices(prefix, {"ffn_gate": (N_FF, N_EMBD), "ffn_up": (N_FF, N_EMBD), "ffn_down": (N_EMBD, N_FF)})
        if given:
            file.matrices(prefix, {"inp_gate": (N_GIVEN, N_EMBD), "proj": (N_EMBD, N_GIVEN)})
            file.norms(prefix, "post_norm")
        if scales:
            file.writer.add_tensor(f"{prefix}.layer_output_scale.weight", np.array([0.5 + 0.1 * i], np.float32))
        if experts:
            _write_experts(file, prefix, experts)
    return file.save(path)


def _write_attention(file: TinyFile, prefix: str, head_dim: int, n_kv_heads: int, has_keys: bool, has_values: bool) -> None:
    n_q, n_kv = N_HEADS * head_dim, n_kv_heads * head_dim
    file.norms(prefix, "attn_norm", "post_attention_norm")
    # Products are not scaled down: short queries keep attention from picking one key, which makes much of rounding.
    queries = head_dim**-0.5 * (1 + 0.1 * file.weights.random.standard_normal(head_dim))
    file.writer.add_tensor(f"{prefix}.attn_q_norm.weight", queries.astype(np.float32))
    file.matrices(prefix, {"attn_q": (n_q, N_EMBD), "attn_output": (N_EMBD, n_q)})
    if has_keys:
        file.norms(prefix, "attn_k_norm", n=head_dim)
        file.matrices(prefix, {"attn_k": (n_kv, N_EMBD)})
        if has_values:
            file.matrices(prefix, {"attn_v": (n_kv, N_EMBD)})


def _write_experts(file: TinyFile, prefix: str, kind: str) -> None:
    names = ("gate_up", "down") if kind == "packed" else ("gate", "up", "down")
    file.experts(prefix, n_experts=N_EXPERTS, n_ff=N_FF_EXPERT, names=names)
    file.norms(prefix, "pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2")
    random = file.weights.random
    # The router's inputs are divided by sqrt(n_embd).
    scale = N_EMBD**0.5 * (1 + 0.3 * random.standard_normal(N_EMBD))
    file.writer.add_tensor(f"{prefix}.ffn_gate_inp.scale", scale.astype(np.float32))
    file.writer.add_tensor(f"{prefix}.ffn_down_exps.scale", random.uniform(0.5, 2.0, N_EXPERTS).astype(np.float32))


GEMMA4 = Row(
    models="Gemma 4 E2B, E4B, 26B-A4B and 31B",
    attends="a window; every fifth or sixth everything",
    write=write_gemma4,
    variants={
        "f32": {},
        "f16": {"dtype": "f16"},
        "q8_0": {"dtype": "q8_0"},
        "large": {"given": False, "n_shared": 0, "n_kv_wide": 2, "keys_as_values": True, "scales": False},
        "experts": {"given": False, "n_shared": 0, "experts": "apart", "keys_as_values": True},
        "packed-experts": {"n_shared": 0, "experts": "packed"},
        "rope": {"rope__freq_base_swa": 500.0, "rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
        "cap": {"final_logit_softcapping": 5.0},
        "cache-q8_0": {},
        "no-flash-small-batches": {"n_layers": 4, "n_shared": 1, **WINDOW_AS_BATCH},
    },
)
