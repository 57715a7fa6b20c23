from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from puna.gguf.types import TensorType
from tests.models.row import Row, TinyFile
from tests.tiny import RandomWeights

# What libllama takes for granted: streams, rank of the low-rank path, values of a token's vector for each layer.
N_STREAMS, RANK, N_GIVEN = 4, 64, 256
N_EMBD, N_HEADS, N_KV_HEADS, HEAD_DIM, N_FF = 128, 4, 2, 32, 256


def write_gemma3n(path: Path, *, n_layers: int = 22, **options: Any) -> Path:
    """The layers from number 20 on, one of each kind, have no keys of their own."""
    n_shared = max(0, n_layers - 20)
    stated: dict[str, Any] = {"attention__key_length": HEAD_DIM, "attention__value_length": HEAD_DIM}
    stated |= {"attention__sliding_window": 48, "attention__shared_kv_layers": n_shared}
    stated |= {"attention__sliding_window_pattern": [(i + 1) % 5 != 0 and i != 21 for i in range(n_layers)]}
    stated |= {"embedding_length_per_layer_input": N_GIVEN, "altup__num_inputs": N_STREAMS, "altup__active_idx": 0}
    stated |= {"activation_sparsity_scale": [1.6448533535003662 if i < 10 else 0.0 for i in range(n_layers)]}
    sizes = {"n_layers": n_layers, "n_embd": N_EMBD, "n_heads": N_HEADS, "n_kv_heads": N_KV_HEADS, "n_ff": N_FF}
    file = TinyFile("gemma3n", **{"rope__freq_base": 1e6, **sizes, **stated, **options})
    file.ends(tied=True)
    w = file.weights
    w.matrix("per_layer_token_embd.weight", file.n_vocab, N_GIVEN * n_layers, std=1 / 16)
    w.matrix("per_layer_model_proj.weight", N_GIVEN * n_layers, N_EMBD, std=1.0)
    w.norm("per_layer_proj_norm.weight", N_GIVEN)
    for name in ("altup_proj", "altup_unembd_proj"):
        w.stack(f"{name}.weight", N_STREAMS - 1, N_EMBD, N_EMBD)
    for i in range(n_layers):
        _write_layer(file, f"blk.{i}")
    return file.save(path)


def _write_layer(file: TinyFile, prefix: str) -> None:
    file.norms(prefix, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_norm", "laurel_post_norm")
    file.norms(prefix, "altup_router_norm", "altup_correct_scale")
    file.norms(prefix, "attn_k_norm", n=HEAD_DIM)
    # Products are not scaled down: short queries keep attention from picking one key, which makes much of rounding.
    queries = HEAD_DIM**-0.5 * (1 + 0.1 * file.weights.random.standard_normal(HEAD_DIM))
    file.writer.add_tensor(f"{prefix}.attn_q_norm.weight", queries.astype(np.float32))
    n_q, n_kv = N_HEADS * HEAD_DIM, N_KV_HEADS * HEAD_DIM
    file.matrices(prefix, {"attn_q": (n_q, N_EMBD), "attn_k": (n_kv, N_EMBD), "attn_v": (n_kv, N_EMBD)})
    file.matrices(prefix, {"attn_output": (N_EMBD, n_q), "laurel_l": (RANK, N_EMBD), "laurel_r": (N_EMBD, RANK)})
    file.matrices(prefix, {"ffn_gate": (N_FF, N_EMBD), "ffn_up": (N_FF, N_EMBD), "ffn_down": (N_EMBD, N_FF)})
    file.matrices(prefix, {"inp_gate": (N_GIVEN, N_EMBD), "proj": (N_EMBD, N_GIVEN)})
    # Routers see inputs that are divided by n_embd; the few coefficients are too short to be quantised.
    plain = RandomWeights(file.writer, int(file.weights.random.integers(1 << 30)), TensorType.F32)
    plain.matrix(f"{prefix}.altup_router.weight", N_STREAMS, N_EMBD, std=N_EMBD**0.5)
    plain.matrix(f"{prefix}.altup_predict_coef.weight", N_STREAMS**2, N_STREAMS, std=0.2)
    plain.matrix(f"{prefix}.altup_correct_coef.weight", N_STREAMS, N_STREAMS, std=0.2)


# What libllama does not ask the file for.
KEYS = (
    "altup__num_inputs",
    "altup__active_idx",
    "activation_sparsity_scale",
    "embedding_length_per_layer_input",
    "attention__shared_kv_layers",
)

GEMMA3N = Row(
    models="Gemma 3n E2B and E4B, text only",
    attends="a window; every fifth everything",
    write=write_gemma3n,
    variants={
        "f32": {},
        "f16": {"dtype": "f16"},
        "q8_0": {"dtype": "q8_0"},
        "own-keys": {"n_layers": 11, **dict.fromkeys(KEYS)},
        "rope": {"rope__freq_base_swa": 500.0, "rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
    },
)
