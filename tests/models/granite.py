from __future__ import annotations

from functools import partial
from typing import Any

from tests.models.prenorm import write_prenorm
from tests.models.row import Row

MULTIPLIERS: dict[str, Any] = {
    "embedding_scale": 3.0,
    "residual_scale": 0.4,
    "attention__scale": 0.2,
    "logit_scale": 4.0,
}

GRANITE = Row(
    models="Granite 3 and 4 (without states)",
    attends="everything before",
    write=partial(write_prenorm, architecture="granite", **MULTIPLIERS),
    variants={
        "f32": {},
        "f16": {"dtype": "f16"},
        "q8_0": {"dtype": "q8_0"},
        "tied": {"tied": True},
        "biases": {"biases": ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")},
        "without-positions": {"rope__scaling__finetuned": False},
        "without-positions-packed": {"rope__scaling__finetuned": False, "packed_qkv": True},
        "only-logits": {"embedding_scale": None, "residual_scale": None, "attention__scale": None},
    },
    shifted_alone={"without-positions": [{}], "without-positions-packed": [{}]},
    note="libllama ends the process when it shifts a context whose keys have no positions to turn",
)

LLAMA = Row(
    models="Granite converted as a Llama",
    attends="everything before",
    write=partial(write_prenorm, architecture="llama", **MULTIPLIERS),
    norm=GRANITE.write,
    variants={"f32": {}, "tied": {"tied": True}, "only-residual": {"embedding_scale": None, "attention__scale": None}},
    note="libllama knows the multipliers in files of the architecture granite only",
)

GRANITEMOE = Row(
    models="Granite 3 1B-A400M, 3B-A800M",
    attends="everything before",
    # Experts as wide as the file's feed_forward_length.
    write=partial(
        write_prenorm,
        architecture="granitemoe",
        n_experts=8,
        n_ff=256,
        n_ff_expert=256,
        expert_feed_forward_length=None,
        **MULTIPLIERS,
    ),
    variants={
        "f32": {},
        "f16": {"dtype": "f16"},
        "q8_0": {"dtype": "q8_0"},
        "shared": {"n_ff_shared": 512},
    },
)
