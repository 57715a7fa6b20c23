from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.models.row import Row, TinyFile
from tests.tiny import write_llama

LLAMA = Row(
    models="Llama 2 and 3, Mistral 7B, SmolLM2, TinyLlama, Yi",
    attends="everything before",
    write=write_llama,
    variants={
        "f32": {},
        "f16": {"dtype": "f16"},
        "q8_0": {"dtype": "q8_0"},
        "q4_K": {"dtype": "q4_K"},
        "tied-biases": {"tied": True, "biases": True},
        "rope-freqs": {"rope_freqs": True, "rope_base": 500000.0},
        "rope-linear": {"rope_scaling": "linear"},
        "no-flash": {},
        "no-flash-f16": {"dtype": "f16"},
        "cache-q8_0": {},
        "cache-q4_0": {"rope_freqs": True},
        "cache-q4_0-heads-of-128": {"n_embd": 384, "n_heads": 3, "n_kv_heads": 1},
    },
)

EMBEDDER = Row(
    models="embedding models made from a Llama or Mistral",
    attends="everything before",
    write=write_llama,
    # Pooling as GGUF numbers it.
    variants={name: {"metadata": {"llama.pooling_type": number}} for name, number in (("mean", 1), ("cls", 2), ("last", 3))},
)


def write_mixtral(path: Path, *, n_experts: int = 8, n_used: int = 2, **options: Any) -> Path:
    file = TinyFile("llama", expert_count=n_experts, expert_used_count=n_used, **options)
    file.ends()
    for i in range(3):
        prefix = f"blk.{i}"
        file.norms(prefix, "attn_norm", "ffn_norm")
        file.matrices(prefix, {"attn_q": (256, 256), "attn_k": (128, 256), "attn_v": (128, 256)})
        file.matrices(prefix, {"attn_output": (256, 256)}, gain=2.0)
        file.experts(prefix, n_experts=n_experts, n_ff=512)
    return file.save(path)


MIXTRAL = Row(
    models="Mixtral",
    attends="everything before",
    write=write_mixtral,
    variants={
        "f32": {},
        "f16": {"dtype": "f16"},
        "q8_0": {"dtype": "q8_0"},
        "q4_K": {"dtype": "q4_K"},
        "one-of-4": {"n_used": 1, "n_experts": 4},
    },
)
