"""Command R and R+, Aya (cohere), Command R7B and A (cohere2). Rows stay as they are: the rotation turns neighbours there too."""

from __future__ import annotations

from dataclasses import replace

from puna.gguf.convert.families.common import (
    KEYS,
    LENGTHS,
    MIXED,
    OUTPUT_NORM,
    QKV,
    SILU,
    TABLE,
    rope,
    swiglu,
    windows,
)
from puna.gguf.convert.fields import Fields
from puna.gguf.convert.rotation import LINEAR
from puna.gguf.convert.table import Family, Line, positive

_KEYS = {key: value for key, value in KEYS.items() if key != "attention.layer_norm_rms_epsilon"}


def _has_norms(fields: Fields) -> bool:
    return fields.flag("use_qk_norm", default=False)


COMMAND_R = Family(
    architecture="command-r",
    layer=(
        Line("attn_norm", "input_layernorm", "embd"),
        *QKV,
        MIXED,
        Line("attn_q_norm", "self_attn.q_norm", "heads head", when=_has_norms, exact=True),
        Line("attn_k_norm", "self_attn.k_norm", "kv_heads head", when=_has_norms, exact=True),
        *swiglu(),
    ),
    ends=(TABLE, OUTPUT_NORM),
    keys={
        **_KEYS,
        "attention.layer_norm_epsilon": positive("layer_norm_eps", default=1e-5),
        "logit_scale": positive("logit_scale", default=0.0625),
    },
    lengths=LENGTHS,
    defaults={"tie_word_embeddings": True},
    expects=SILU | {"tie_word_embeddings": (True,), "use_parallel_block": (True,), "use_gated_activation": (True,)},
    rope=rope(LINEAR),
)


def _period(fields: Fields) -> int:
    return fields.whole("sliding_window_pattern", "_sliding_window_pattern", default=4, high=1024)


COHERE2 = replace(
    COMMAND_R,
    architecture="cohere2",
    keys={
        **COMMAND_R.keys,
        "attention.sliding_window": windows(4)["attention.sliding_window"],
        "attention.sliding_window_pattern": lambda fields: windows(_period(fields))["attention.sliding_window_pattern"](fields),
    },
    expects={**COMMAND_R.expects, "use_qk_norm": (False,), "order_of_interleaved_layers": ("local_attn_first",)},
    defaults={**COMMAND_R.defaults, "sliding_window": 4096},
)
