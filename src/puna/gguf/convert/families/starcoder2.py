"""StarCoder 2: LayerNorm, a plain MLP, biases everywhere. Its window is left out, as in llama.cpp."""

from __future__ import annotations

from puna.gguf.convert.families.common import ENDS, KEYS, LENGTHS, MIXED, NORMS, QKV, rope
from puna.gguf.convert.rotation import LINEAR
from puna.gguf.convert.table import Family, Line, positive

STARCODER2 = Family(
    architecture="starcoder2",
    layer=(
        *NORMS,
        *QKV,
        MIXED,
        Line("ffn_up", "mlp.c_fc", "ff embd"),
        Line("ffn_down", "mlp.c_proj", "embd ff"),
    ),
    ends=ENDS,
    keys={
        **{key: value for key, value in KEYS.items() if key != "attention.layer_norm_rms_epsilon"},
        "attention.layer_norm_epsilon": positive("norm_epsilon", default=1e-5),
    },
    lengths=LENGTHS,
    defaults={"tie_word_embeddings": True},
    expects={"hidden_act": ("gelu_pytorch_tanh",), "use_bias": (True,), "mlp_type": ("default",), "norm_type": ("layer_norm",)},
    rope=rope(LINEAR),
)
