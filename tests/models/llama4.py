from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.models.row import Row, TinyFile


def write_llama4(
    path: Path,
    *,
    n_layers: int = 5,
    n_experts: int = 4,
    moe_step: int = 1,
    tied: bool = False,
    rope_freqs: bool = False,
    **options: Any,
) -> Path:
    n_ff = 128
    stated: dict[str, Any] = {"expert_count": n_experts, "expert_used_count": 1, "expert_feed_forward_length": n_ff}
    stated |= {"interleave_moe_layer_step": moe_step}
    file = TinyFile("llama4", n_layers=n_layers, **{**stated, **options})
    file.ends(tied=tied)
    if rope_freqs:
        file.writer.add_tensor("rope_freqs.weight", np.linspace(1.0, 8.0, 32, dtype=np.float32))
    for i in range(n_layers):
        prefix = f"blk.{i}"
        file.norms(prefix, "attn_norm", "ffn_norm")
        file.matrices(prefix, {"attn_q": (256, 256), "attn_k": (128, 256), "attn_v": (128, 256)})
        file.matrices(prefix, {"attn_output": (256, 256)}, gain=2.0)
        if (i + 1) % moe_step:
            file.mlp(prefix, n_ff=512)
            continue
        file.experts(prefix, n_experts=n_experts, n_ff=n_ff)
        file.mlp(prefix, n_ff=n_ff, suffix="_shexp")
    return file.save(path)


LLAMA4 = Row(
    models="Llama 4 Scout and Maverick",
    attends="its chunk of 8192; every fourth everything",
    write=write_llama4,
    variants={
        "f32": {},
        "f16": {"dtype": "f16", "rope_freqs": True},
        "q8_0": {"dtype": "q8_0"},
        "every-second-tied": {"moe_step": 2, "tied": True},
        "two-of-128": {"n_experts": 128, "expert_used_count": 2},
        "pattern": {"attention__sliding_window_pattern": [False, True, True, True, False]},
    },
    # Where each layer rotates; cohere2 shifts layers that do not.
    shifted_alone={
        variant: [{"attention__sliding_window_pattern": 4, "moe_step": 1}]
        for variant in ("f32", "f16", "q8_0", "every-second-tied", "two-of-128", "pattern")
    },
    note="libllama turns the keys of a shifted context in layers without rotation too",
)
