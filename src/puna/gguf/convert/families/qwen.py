"""Qwen 2, 2.5 and 3, dense and with experts."""

from __future__ import annotations

from dataclasses import replace

from puna.gguf.convert.families.common import (
    ENDS,
    HEAD_NORMS,
    KEYS,
    LENGTHS,
    MIXED,
    NORMS,
    QKV,
    SILU,
    count,
    everywhere,
    experts,
    mixture,
    rope,
    router,
    swiglu,
    used,
)
from puna.gguf.convert.rotation import LINEAR, YARN
from puna.gguf.convert.table import Family, Line, always, whole

_EXPECTS = SILU | {"use_sliding_window": (False,), "partial_rotary_factor": (1.0,)}

QWEN2 = Family(
    architecture="qwen2",
    layer=(*NORMS, *(replace(line, biased=always) for line in QKV), MIXED, *swiglu()),
    ends=ENDS,
    keys=KEYS,
    lengths=LENGTHS,
    expects=_EXPECTS,
    rope=rope(LINEAR, YARN),
)

QWEN3 = replace(QWEN2, architecture="qwen3", layer=(*NORMS, *QKV, MIXED, *HEAD_NORMS, *swiglu()))

_KEYS, _LENGTHS = mixture(
    count("num_experts", "num_local_experts"), used("num_experts_per_tok"), whole("moe_intermediate_size", high=1 << 24)
)


SHARED = (
    Line("ffn_gate_inp_shexp", "mlp.shared_expert_gate", "1 embd", exact=True),
    *swiglu("mlp.shared_expert.{}_proj", suffix="_shexp", width="ff_shared"),
)
SHARED_WIDTH = whole("shared_expert_intermediate_size", high=1 << 24)

QWEN2MOE = replace(
    QWEN2,
    architecture="qwen2moe",
    layer=(*QWEN2.layer[:6], router("mlp.gate"), *experts(), *SHARED),
    keys={**KEYS, **_KEYS, "expert_shared_feed_forward_length": SHARED_WIDTH},
    lengths={**LENGTHS, **_LENGTHS, "ff_shared": SHARED_WIDTH},
    check=lambda fields: everywhere(fields, is_normalised=False),
)

QWEN3MOE = replace(
    QWEN3,
    architecture="qwen3moe",
    layer=(*NORMS, *QKV, MIXED, *HEAD_NORMS, router("mlp.gate"), *experts()),
    keys={**KEYS, **_KEYS},
    lengths={**LENGTHS, **_LENGTHS},
    check=lambda fields: everywhere(fields, is_normalised=True),
)
