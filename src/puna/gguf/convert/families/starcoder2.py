"""StarCoder 2: LayerNorm, a plain MLP, biases everywhere. Its window is left out, as in llama.cpp."""

from __future__ import annotations

from dataclasses import replace

from puna.gguf.convert.families.common import HEAD, KEYS, LENGTHS, MIXED, NORMS, OUTPUT_NORM, QKV, TABLE, rope
from puna.gguf.convert.rotation import LINEAR
from puna.gguf.convert.table import Family, Line, always, positive


def _biased(*lines: Line) -> tuple[Line, ...]:
    return tuple(replace(line, biased=always) for line in lines)


STARCODER2 = Family(
    architecture="starcoder2",
    layer=(
        *_biased(*NORMS, *QKV, MIXED),
        *_biased(Line("ffn_up", "mlp.c_fc", "ff embd"), Line("ffn_down", "mlp.c_proj", "embd ff")),
    ),
    ends=(TABLE, *_biased(OUTPUT_NORM), HEAD),
    keys={
        **{key: value for key, value in KEYS.items() if key != "attention.layer_norm_rms_epsilon"},
        "attention.layer_norm_epsilon": positive("norm_epsilon", default=1e-5),
    },
    lengths=LENGTHS,
    defaults={"tie_word_embeddings": True},
    expects={"hidden_act": ("gelu_pytorch_tanh",), "use_bias": (True,), "mlp_type": ("default",), "norm_type": ("layer_norm",)},
    rope=rope(LINEAR),
)
