"""Gemma, Gemma 2, and what reads of Gemma 3. Checkpoints store norms less one.

What llama.cpp takes for granted in these architectures (which layers have a window, how scores are scaled) must be as the
configuration says.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from puna.errors import UnsupportedModel
from puna.gguf.convert.families.common import (
    FULL,
    HEAD_NORMS,
    KEYS,
    LENGTHS,
    MIXED,
    NORMS,
    OUTPUT_NORM,
    QKV,
    TABLE,
    WINDOW,
    every,
    head,
    n_heads,
    n_layers,
    rope,
    swiglu,
)
from puna.gguf.convert.fields import Fields
from puna.gguf.convert.rotation import LINEAR, Rotation
from puna.gguf.convert.table import Family, Line, perhaps_positive, plus_one, positive, whole

_GELU = "gelu_pytorch_tanh"
_LOCAL_BASE = 10000.0
VISION = (r"(model\.)?vision_tower\..*", r"(model\.)?multi_modal_projector\..*")


def _less_one(*lines: Line) -> tuple[Line, ...]:
    return tuple(replace(line, change=plus_one) for line in lines)


GEMMA = Family(
    architecture="gemma",
    layer=(*_less_one(*NORMS), *QKV, MIXED, *swiglu()),
    ends=(TABLE, *_less_one(OUTPUT_NORM)),
    keys=KEYS,
    lengths=LENGTHS,
    defaults={"tie_word_embeddings": True, "head_dim": 256},
    # The first files call the approximation by its plain name.
    expects={"hidden_activation": (_GELU,), "hidden_act": (_GELU, "gelu"), "tie_word_embeddings": (True,)},
    rope=rope(),
)

_SANDWICH = (
    Line("attn_norm", "input_layernorm", "embd"),
    Line("post_attention_norm", "post_attention_layernorm", "embd"),
    Line("ffn_norm", "pre_feedforward_layernorm", "embd"),
    Line("post_ffw_norm", "post_feedforward_layernorm", "embd"),
)


def check_gemma(fields: Fields, architecture: str, period: int, n_layers_of_largest: int, scalar: float) -> None:
    """The largest model divides scores by what its heads would be wide if they shared the embedding."""
    is_largest = n_layers(fields) == n_layers_of_largest
    expected = {
        "query_pre_attn_scalar": fields.whole("hidden_size") / n_heads(fields) if is_largest else head(fields),
        "layer_types": every(fields, period, WINDOW, FULL),
    }
    stated = {
        "query_pre_attn_scalar": fields.number("query_pre_attn_scalar", default=scalar),
        "layer_types": fields.get("layer_types"),
    }
    if fields.has("sliding_window_pattern", "_sliding_window_pattern"):
        expected["sliding_window_pattern"] = period
        stated["sliding_window_pattern"] = fields.whole("sliding_window_pattern", "_sliding_window_pattern")
    for name, wanted in expected.items():
        if stated[name] is not None and stated[name] != wanted:
            what = f"{fields.file}: {name} is {str(stated[name])[:100]}"
            raise UnsupportedModel(f"{what}; a {architecture} can only be converted with {str(wanted)[:100]}")


GEMMA2 = replace(
    GEMMA,
    architecture="gemma2",
    layer=(*_less_one(*_SANDWICH), *QKV, MIXED, *swiglu()),
    keys={
        **KEYS,
        "attention.sliding_window": whole("sliding_window"),
        "attn_logit_softcapping": positive("attn_logit_softcapping"),
        "final_logit_softcapping": positive("final_logit_softcapping"),
    },
    expects={
        "hidden_activation": (_GELU,),
        "tie_word_embeddings": (True,),
        "use_bidirectional_attention": (False,),
        "rope_local_base_freq": (_LOCAL_BASE,),
    },
    check=lambda fields: check_gemma(fields, "gemma2", 2, 46, 256.0),
)


def _gemma3_rope(fields: Fields) -> dict[str, Any]:
    """Layers with a window rotate by a base of their own, which is the same in all files."""
    local = fields.object("rope_parameters").object(WINDOW)
    base = local.number("rope_theta", default=fields.number("rope_local_base_freq", default=_LOCAL_BASE))
    if base != _LOCAL_BASE or local.get("rope_type") not in (None, "default"):
        raise UnsupportedModel(
            f"{fields.file}: rope_local_base_freq is {base}; a gemma3 can only be converted with {_LOCAL_BASE}, not stretched"
        )
    return Rotation(fields, head(fields), (LINEAR,), FULL).keys()


GEMMA3 = replace(
    GEMMA2,
    architecture="gemma3",
    layer=(*_less_one(*_SANDWICH, *HEAD_NORMS), *QKV, MIXED, *swiglu()),
    keys={
        **KEYS,
        "attention.sliding_window": whole("sliding_window"),
        "final_logit_softcapping": perhaps_positive("final_logit_softcapping"),
    },
    # What the published files with images leave out.
    defaults={
        **GEMMA.defaults,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "sliding_window": 4096,
    },
    expects={**GEMMA2.expects, "attn_logit_softcapping": ()},
    rope=_gemma3_rope,
    check=lambda fields: check_gemma(fields, "gemma3", 6, 62, 256.0),
)
