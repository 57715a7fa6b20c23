from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.models.row import WINDOW_AS_BATCH, Row, TinyFile


def write_cohere(path: Path, architecture: str, *, n_layers: int, n_embd: int = 256, n_kv_heads: int = 2, **options: Any) -> Path:
    n_heads, n_ff = 4, 2 * n_embd
    head_dim = n_embd // n_heads
    norms = {"attention__layer_norm_rms_epsilon": None, "attention__layer_norm_epsilon": 1e-5}
    numbers = {"n_layers": n_layers, "n_embd": n_embd, "n_heads": n_heads, "n_kv_heads": n_kv_heads, "n_ff": n_ff}
    file = TinyFile(architecture, **{**numbers, **norms, "logit_scale": 0.25, **options})
    file.ends(tied=True, logits_std=12.0)
    n_kv = n_kv_heads * head_dim
    for i in range(n_layers):
        prefix = f"blk.{i}"
        file.norms(prefix, "attn_norm")
        if n_layers >= 64:  # as Command R+, which libllama knows by its layers
            for name, n in (("attn_q_norm", n_heads), ("attn_k_norm", n_kv_heads)):
                weights = 1 + 0.3 * file.weights.random.standard_normal((n, head_dim))
                file.writer.add_tensor(f"{prefix}.{name}.weight", weights.astype(np.float32))
        file.matrices(prefix, {"attn_q": (n_embd, n_embd), "attn_k": (n_kv, n_embd), "attn_v": (n_kv, n_embd)})
        file.matrices(prefix, {"attn_output": (n_embd, n_embd), "ffn_down": (n_embd, n_ff)}, gain=2.0)
        file.matrices(prefix, {"ffn_gate": (n_ff, n_embd), "ffn_up": (n_ff, n_embd)})
    return file.save(path)


COMMAND_R = Row(
    models="Command R and R+, Aya 23 and Expanse",
    attends="everything before",
    write=partial(write_cohere, architecture="command-r"),
    variants={
        "f32": {"n_layers": 3},
        "f16": {"n_layers": 3, "dtype": "f16", "n_kv_heads": 4},
        "q8_0": {"n_layers": 3, "dtype": "q8_0"},
        "norms": {"n_layers": 64, "n_embd": 64},
        "no-scale": {"n_layers": 3, "logit_scale": None, "rope__scaling__type": "none"},
    },
)

# A layer that knows no positions, and one that does.
ALONE = [{"n_layers": 1, "attention__sliding_window_pattern": n} for n in (0, 1)]

COHERE2 = Row(
    models="Command R7B, Command A",
    attends="a window; every fourth everything",
    write=partial(write_cohere, architecture="cohere2", attention__sliding_window=48),
    variants={
        "f32": {"n_layers": 5},
        "f16": {"n_layers": 5, "dtype": "f16"},
        "q8_0": {"n_layers": 5, "dtype": "q8_0"},
        "pattern": {"n_layers": 5, "attention__sliding_window_pattern": [False, True, True, False, True]},
        "no-flash-small-batches": {"n_layers": 5, **WINDOW_AS_BATCH},
    },
    shifted_alone=dict.fromkeys(("f32", "f16", "q8_0", "pattern", "no-flash-small-batches"), ALONE),
    note="libllama turns the keys of a shifted context in layers without rotation too",
)
