"""What reads of Llama 4: Scout and Maverick. Matrices of experts are stored the other way round, gate and up as one."""

from __future__ import annotations

from collections.abc import Set

from puna.errors import UnsupportedModel
from puna.gguf.convert.families.common import (
    ENDS,
    KEYS,
    LENGTHS,
    MIXED,
    NORMS,
    QKV,
    SILU,
    count,
    factors,
    mixture,
    n_layers,
    rope,
    router,
    swiglu,
    used,
)
from puna.gguf.convert.fields import Fields
from puna.gguf.convert.rotation import LLAMA3
from puna.gguf.convert.table import Family, Line, halves, then, transposed, whole

_PERIOD = 4  # the last of so many layers rotates nothing
_N_EXPERTS_WITHOUT_NORMS = 128
_WIDTH = whole("intermediate_size", high=1 << 24)
_DENSE_WIDTH = whole("intermediate_size_mlp", high=1 << 24)
_KEYS, _LENGTHS = mixture(count("num_local_experts"), used("num_experts_per_tok"), _WIDTH)


def _step(fields: Fields) -> int:
    return fields.whole("interleave_moe_layer_step", default=1, high=1024)


def _kinds(fields: Fields, layer: int) -> Set[str]:
    return {"dense" if (layer + 1) % _step(fields) else "experts"}


def _check(fields: Fields) -> None:
    """What GGUF takes for granted.

    Errors: UnsupportedModel naming the field.
    """
    layers = range(n_layers(fields))
    wanted = {
        "no_rope_layers": [int((i + 1) % _PERIOD != 0) for i in layers],
        "moe_layers": [i for i in layers if (i + 1) % _step(fields) == 0],
        "use_qk_norm": count("num_local_experts")(fields) != _N_EXPERTS_WITHOUT_NORMS,
        "attn_temperature_tuning": True,
        "floor_scale": fields.whole("attention_chunk_size", default=8192),
        "attn_scale": 0.1,
    }
    for name, value in wanted.items():
        found = fields.get(name)
        if name == "attn_temperature_tuning" and found in (4, 1):  # as the first files have it
            continue
        if found is not None and found != [] and found != value:
            raise UnsupportedModel(
                f"{fields.file}: {name} is {str(found)[:100]}; a llama4 can only be converted with {str(value)[:100]}"
            )


_SHARED = swiglu("feed_forward.shared_expert.{}_proj", on="experts", suffix="_shexp", width="ff_expert")
_BOTH, _TURNED = "experts embd 2*ff_expert", "experts ff_expert embd"

LLAMA4 = Family(
    architecture="llama4",
    layer=(
        *NORMS,
        *QKV,
        MIXED,
        *swiglu("feed_forward.{}_proj", on="dense", width="ff_dense"),
        router("feed_forward.router", on="experts"),
        Line(
            "ffn_gate_exps.weight",
            "feed_forward.experts.gate_up_proj",
            _BOTH,
            then(halves(2, second=False), transposed),
            _TURNED,
            on="experts",
            whole=True,
        ),
        Line(
            "ffn_up_exps.weight",
            "feed_forward.experts.gate_up_proj",
            _BOTH,
            then(halves(2, second=True), transposed),
            _TURNED,
            on="experts",
            whole=True,
        ),
        Line(
            "ffn_down_exps.weight",
            "feed_forward.experts.down_proj",
            _TURNED,
            transposed,
            "experts embd ff_expert",
            on="experts",
            whole=True,
        ),
        *_SHARED,
    ),
    ends=ENDS,
    keys={
        **KEYS,
        **_KEYS,
        "feed_forward_length": _DENSE_WIDTH,
        "interleave_moe_layer_step": _step,
        "attention.chunk_size": whole("attention_chunk_size", default=8192),
    },
    lengths={**LENGTHS, **_LENGTHS, "ff_dense": _DENSE_WIDTH},
    defaults={"rope_theta": 500000.0, "rms_norm_eps": 1e-5},
    expects=SILU,
    rope=rope(LLAMA3),
    made=factors(LLAMA3),
    check=_check,
    kinds=_kinds,
    unused=(r"(model\.)?vision_model\..*", r"(model\.)?multi_modal_projector\..*"),
)
