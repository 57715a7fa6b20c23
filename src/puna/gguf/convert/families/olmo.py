"""OLMo 2 and 3: norms after attention and MLP, and over all queries and all keys. OLMo 3 has windows."""

from __future__ import annotations

from dataclasses import replace

from puna.gguf.convert.families.common import ENDS, KEYS, LENGTHS, MIXED, QKV, SILU, rope, swiglu, windows
from puna.gguf.convert.rotation import LINEAR, YARN
from puna.gguf.convert.table import Family, Line

OLMO2 = Family(
    architecture="olmo2",
    layer=(
        *QKV,
        MIXED,
        Line("attn_q_norm", "self_attn.q_norm", "q"),
        Line("attn_k_norm", "self_attn.k_norm", "k"),
        Line("post_attention_norm", "post_attention_layernorm", "embd"),
        Line("post_ffw_norm", "post_feedforward_layernorm", "embd"),
        *swiglu(),
    ),
    ends=ENDS,
    keys=KEYS,
    lengths=LENGTHS,
    defaults={"rms_norm_eps": 1e-5},
    expects=SILU,
    rope=rope(LINEAR, YARN),
)

OLMO3 = replace(OLMO2, keys={**KEYS, **windows(4)}, defaults={**OLMO2.defaults, "sliding_window": 4096}, rope=rope(YARN))
