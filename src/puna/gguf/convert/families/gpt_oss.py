"""gpt-oss, 20B and 120B: experts in MXFP4 as they are published, or in 16 bits.

Gate and up stand in turn, row by row; matrices in 16 bits are stored the other way round. YaRN's ramp begins and ends at
whole pairs in GGUF's arithmetic, whatever ``truncate`` says.
"""

from __future__ import annotations

from dataclasses import replace

from puna.gguf.convert.families.common import (
    ENDS,
    KEYS,
    LENGTHS,
    MIXED,
    NORMS,
    QKV,
    SILU,
    count,
    mixture,
    rope,
    router,
    used,
    windows,
)
from puna.gguf.convert.fields import Fields
from puna.gguf.convert.rotation import LINEAR, YARN
from puna.gguf.convert.table import Change, Family, Lengths, Line, Rows, always, then, transposed, whole


def _every_other(begin: int) -> Change:
    """Rows of each expert's matrix, or values of its bias: those of the gate or of up."""

    def chosen(rows: Rows, lengths: Lengths) -> Rows:
        return rows[:, begin::2]

    return chosen


_EXPERTS = "mlp.experts."
_GATE, _UP = _every_other(0), _every_other(1)
_BOTH, _DOWN = "experts embd 2*ff_expert", "experts ff_expert embd"
_ONE, _DOWN_TURNED = "experts ff_expert embd", "experts embd ff_expert"
_KEYS, _LENGTHS = mixture(
    count("num_local_experts", "num_experts"),
    used("num_experts_per_tok", "experts_per_token"),
    whole("intermediate_size", high=1 << 24),
)


def _is_packed(fields: Fields) -> bool:
    return bool(fields.object("quantization_config").get("quant_method") == "mxfp4")


def _blocks(name: str, part: str, dims: str, change: Change | None, to: str) -> Line:
    return Line(f"ffn_{name}_exps.weight", _EXPERTS + part, dims, change, to, whole=True, packed=True, when=_is_packed)


def _numbers(name: str, part: str, dims: str, change: Change, to: str) -> Line:
    return replace(_blocks(name, part, dims, change, to), packed=False, when=lambda fields: not _is_packed(fields))


GPT_OSS = Family(
    architecture="gpt-oss",
    layer=(
        NORMS[0],
        Line("post_attention_norm", "post_attention_layernorm", "embd"),
        *(replace(line, biased=always) for line in (*QKV, MIXED)),
        Line("attn_sinks.weight", "self_attn.sinks", "heads", whole=True),
        replace(router("mlp.router"), biased=always),
        _blocks("gate", "gate_up_proj", "experts 2*ff_expert embd", _GATE, _ONE),
        _blocks("up", "gate_up_proj", "experts 2*ff_expert embd", _UP, _ONE),
        _blocks("down", "down_proj", "experts embd ff_expert", None, _DOWN_TURNED),
        _numbers("gate", "gate_up_proj", _BOTH, then(transposed, _GATE), _ONE),
        _numbers("up", "gate_up_proj", _BOTH, then(transposed, _UP), _ONE),
        _numbers("down", "down_proj", _DOWN, transposed, _DOWN_TURNED),
        Line(
            "ffn_gate_exps.bias",
            _EXPERTS + "gate_up_proj_bias",
            "experts 2*ff_expert",
            _GATE,
            "experts ff_expert",
            whole=True,
            exact=True,
        ),
        Line(
            "ffn_up_exps.bias",
            _EXPERTS + "gate_up_proj_bias",
            "experts 2*ff_expert",
            _UP,
            "experts ff_expert",
            whole=True,
            exact=True,
        ),
        Line("ffn_down_exps.bias", _EXPERTS + "down_proj_bias", "experts embd", whole=True, exact=True),
    ),
    ends=ENDS,
    keys={**KEYS, **_KEYS, **windows(2)},
    lengths={**LENGTHS, **_LENGTHS},
    defaults={"rope_theta": 150000.0, "rms_norm_eps": 1e-5, "head_dim": 64, "sliding_window": 128},
    expects=SILU | {"swiglu_limit": (7.0,), "swiglu_alpha": (1.702,)},
    rope=rope(LINEAR, YARN),
)
