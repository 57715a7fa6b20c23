from __future__ import annotations

from functools import partial
from typing import Any

from tests.models.prenorm import WIDE_HEADS, write_prenorm
from tests.models.row import Row

YARN = {
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 4.0,
    "rope__scaling__original_context_length": 256,
}
YARN_NOTE = "libllama multiplies shifted keys by YaRN's magnitude a second time"

QWEN2 = Row(
    models="Qwen 2 and 2.5, QwQ, DeepSeek-R1 distilled into Qwen",
    attends="everything before",
    write=partial(write_prenorm, architecture="qwen2", biases=("attn_q", "attn_k", "attn_v")),
    variants={
        "f32": {},
        "f16": {"dtype": "f16"},
        "q8_0": {"dtype": "q8_0"},
        "q4_K": {"dtype": "q4_K"},
        "tied": {"tied": True, "rope__freq_base": 1e6},
        "no-biases": {"biases": ()},
        "yarn": YARN,
        "cache-q8_0": {},
    },
    shifted_alone={"yarn": [{}]},
    note=YARN_NOTE,
)

_QWEN3: dict[str, Any] = {"architecture": "qwen3", "query_key_norms": True, "head_dim": 96}

QWEN3 = Row(
    models="Qwen 3 0.6B to 32B",
    attends="everything before",
    write=partial(write_prenorm, **_QWEN3),
    variants={
        "f32": {},
        "f16": {"dtype": "f16"},
        "q8_0": {"dtype": "q8_0"},
        "tied": {"tied": True, "rope__freq_base": 1e6},
        "yarn": YARN,
    },
    worst=WIDE_HEADS,
    shifted_alone={"yarn": [{}]},
    note=YARN_NOTE,
)

QWEN3_EMBEDDER = Row(
    models="Qwen3-Embedding",
    attends="everything before",
    write=partial(write_prenorm, tied=True, spm=True, **_QWEN3),
    variants={"last": {"pooling_type": 3}, "mean": {"pooling_type": 1}},
)

_EXPERTS: dict[str, Any] = {"n_experts": 8}

QWEN2MOE = Row(
    models="Qwen1.5-MoE A2.7B, Qwen 2 57B-A14B",
    attends="everything before",
    write=partial(
        write_prenorm,
        architecture="qwen2moe",
        biases=("attn_q", "attn_k", "attn_v"),
        n_ff_shared=512,
        shared_gate=True,
        **_EXPERTS,
    ),
    variants={
        "f32": {},
        "f16": {"dtype": "f16"},
        "q8_0": {"dtype": "q8_0"},
        "one-of-4": {"n_experts": 4, "n_used": 1},
    },
)

QWEN3MOE = Row(
    models="Qwen 3 30B-A3B, 235B-A22B, Qwen3-Coder",
    attends="everything before",
    write=partial(write_prenorm, **{**_QWEN3, **_EXPERTS, "architecture": "qwen3moe"}),
    variants={
        "f32": {},
        "f16": {"dtype": "f16"},
        "q4_K": {"dtype": "q4_K", "head_dim": 64},
        "many-experts": {"n_experts": 32, "n_used": 8, "n_ff_expert": 64},
        # With 8 experts one row of one step is a tie between two of them, which the engines break differently.
        "tied": {"tied": True, "n_experts": 12},
    },
    worst=WIDE_HEADS,
)
