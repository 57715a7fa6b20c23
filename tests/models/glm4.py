from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.models.row import Row, TinyFile


def write_glm4(path: Path, *, biases: bool = True, tied: bool = False, n_layers: int = 3, **options: Any) -> Path:
    file = TinyFile("glm4", n_layers=n_layers, **{"rope__dimension_count": 32, **options})
    file.ends(tied=tied)
    for i in range(n_layers):
        prefix = f"blk.{i}"
        file.norms(prefix, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        file.matrices(prefix, {"attn_q": (256, 256), "attn_k": (128, 256), "attn_v": (128, 256)}, biases=biases)
        file.matrices(prefix, {"attn_output": (256, 256), "ffn_up": (1024, 256), "ffn_down": (256, 512)})
    return file.save(path)


GLM4 = Row(
    models="GLM-4 0414 9B and 32B, GLM-Z1",
    attends="everything before",
    write=write_glm4,
    variants={
        "f32": {},
        "f16": {"dtype": "f16"},
        "q8_0": {"dtype": "q8_0"},
        "tied-no-biases": {"biases": False, "tied": True},
        "rope-linear": {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
        "sections": {"rope__dimension_sections": [8, 4, 4, 0]},
    },
    shifted_alone={"sections": [{}]},
    note="libllama shifts no context of a model with sections in its rotation",
)


def write_glm4moe(
    path: Path, *, norms: bool = False, n_dense: int = 1, n_shared: int = 1, n_layers: int = 4, nextn: int = 0, **options: Any
) -> Path:
    """The last *nextn* of the layers guess further tokens."""
    n_experts, n_ff = 8, 128
    stated: dict[str, Any] = {"rope__dimension_count": 32, "attention__key_length": 64, "attention__value_length": 64}
    stated |= {"expert_count": n_experts, "expert_used_count": 3, "expert_shared_count": n_shared}
    stated |= {"expert_feed_forward_length": n_ff, "leading_dense_block_count": n_dense, "nextn_predict_layers": nextn}
    stated |= {"expert_weights_norm": True, "expert_weights_scale": 1.5, "expert_gating_func": 2}
    file = TinyFile("glm4moe", n_layers=n_layers, **{**stated, **options})
    file.ends()
    for i in range(n_layers):
        prefix = f"blk.{i}"
        file.norms(prefix, "attn_norm", "post_attention_norm")
        file.matrices(prefix, {"attn_q": (256, 256), "attn_k": (128, 256), "attn_v": (128, 256)}, biases=True)
        file.matrices(prefix, {"attn_output": (256, 256)}, gain=2.0)
        if norms:
            file.norms(prefix, "attn_q_norm", "attn_k_norm", n=64)
        if i < n_dense:
            file.mlp(prefix, n_ff=512)
            continue
        file.experts(prefix, n_experts=n_experts, n_ff=n_ff)
        file.selection_bias(prefix, n_experts)
        if n_shared:
            file.mlp(prefix, n_ff=n_shared * n_ff, suffix="_shexp")
        if i >= n_layers - nextn:
            file.matrices(prefix, {"nextn.eh_proj": (256, 512)})
            file.norms(prefix, "nextn.enorm", "nextn.hnorm")
    return file.save(path)


GLM4MOE = Row(
    models="GLM-4.5, 4.6 and 4.5 Air",
    attends="everything before",
    write=write_glm4moe,
    variants={
        "f32": {},
        "f16": {"dtype": "f16", "norms": True},
        "q8_0": {"dtype": "q8_0"},
        "norms-two-dense": {"norms": True, "n_dense": 2, "n_shared": 2},
        "next-tokens": {"nextn": 1},
        "as-they-are": {"expert_weights_norm": False, "expert_weights_scale": None, "expert_gating_func": None},
        "softmax": {"expert_gating_func": 1},
    },
)
