"""Llama and the models of its shape: Llama 2 and 3, Mistral 7B, Mixtral, Yi, SmolLM, TinyLlama.

Mistral's window is not written: llama.cpp's architecture ``llama`` has none.
"""

from __future__ import annotations

from dataclasses import replace

from puna.gguf.convert.families.common import (
    ENDS,
    KEYS,
    LENGTHS,
    MIXED,
    NORMS,
    PAIRED_QKV,
    SILU,
    count,
    everywhere,
    experts,
    factors,
    mixture,
    rope,
    router,
    swiglu,
    used,
)
from puna.gguf.convert.rotation import LINEAR, LLAMA3, YARN
from puna.gguf.convert.table import Family, whole

_ROPE = (LINEAR, YARN, LLAMA3)

LLAMA = Family(
    architecture="llama",
    layer=(*NORMS, *PAIRED_QKV, MIXED, *swiglu()),
    ends=ENDS,
    keys=KEYS,
    lengths=LENGTHS,
    expects=SILU | {"use_sliding_window": (False,), "partial_rotary_factor": (1.0,)},
    rope=rope(*_ROPE),
    made=factors(*_ROPE),
)

_KEYS, _LENGTHS = mixture(
    count("num_local_experts"), used("num_experts_per_tok"), whole("moe_intermediate_size", "intermediate_size", high=1 << 24)
)

MIXTRAL = replace(
    LLAMA,
    layer=(
        *NORMS,
        *PAIRED_QKV,
        MIXED,
        router("block_sparse_moe.gate"),
        *(
            replace(line, theirs=f"block_sparse_moe.experts.{{e}}.{name}")
            for line, name in zip(experts(), ("w1", "w3", "w2"), strict=True)
        ),
    ),
    keys={**KEYS, **_KEYS},
    lengths={**LENGTHS, **_LENGTHS},
    defaults={"norm_topk_prob": True},
    check=lambda fields: everywhere(fields, is_normalised=True),
)
