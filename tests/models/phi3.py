from __future__ import annotations

from functools import partial
from typing import Any

from tests.models.prenorm import write_prenorm
from tests.models.row import Row

LONGROPE: dict[str, Any] = {"rope_factors": True, "rope__scaling__attn_factor": 1.19}

PHI3 = Row(
    models="Phi-3 mini and medium, Phi-4",
    attends="everything before",
    write=partial(write_prenorm, architecture="phi3", packed_qkv=True, packed_mlp=True),
    variants={
        "f32": {},
        "f16": {"dtype": "f16"},
        "q8_0": {"dtype": "q8_0"},
        "tied": {"tied": True},
        "part-rotated": {"rope__dimension_count": 48},
        "long": {**LONGROPE, "rope__scaling__original_context_length": 512},
        "short": {**LONGROPE, "rope__scaling__original_context_length": 1024},
        "window-left-out": {"attention__sliding_window": 32},
        "separate": {"packed_qkv": False},
    },
    shifted_alone={"long": [{}], "short": [{}]},
    note="the window is left out, as in llama.cpp; libllama multiplies shifted keys by LongRoPE's magnitude a second time",
)
