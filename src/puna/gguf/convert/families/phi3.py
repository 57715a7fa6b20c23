"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini. The window that some state is not applied, as in llama.cpp."""

from __future__ import annotations

from puna.gguf.convert.families.common import ENDS, KEYS, LENGTHS, MIXED, NORMS, SILU, factors, head, n_heads, n_kv_heads, rope
from puna.gguf.convert.rotation import LONG
from puna.gguf.convert.table import Family, Line, perhaps_whole

PHI3 = Family(
    architecture="phi3",
    layer=(
        *NORMS,
        Line("attn_qkv", "self_attn.qkv_proj", "qkv embd"),
        MIXED,
        Line("ffn_up", "mlp.gate_up_proj", "2*ff embd"),
        Line("ffn_down", "mlp.down_proj", "embd ff"),
    ),
    ends=ENDS,
    keys={**KEYS, "attention.sliding_window": perhaps_whole("sliding_window")},
    lengths={**LENGTHS, "qkv": lambda fields: (n_heads(fields) + 2 * n_kv_heads(fields)) * head(fields)},
    defaults={"rms_norm_eps": 1e-5},
    expects=SILU,
    rope=rope(LONG),
    made=factors(LONG),
)
