"""ModernBERT and what is made of it: an encoder of texts with rotary positions, most of whose layers see a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from puna.errors import FileFormatError, UnsupportedModel
from puna.gguf.convert import vocabulary
from puna.gguf.convert.checkpoint import Checkpoint
from puna.gguf.convert.families.common import FULL, WINDOW, n_layers
from puna.gguf.convert.fields import Fields
from puna.gguf.convert.pooling import pooling
from puna.gguf.convert.table import Family, Line, never, positive, whole
from puna.gguf.convert.vocabulary import Vocabulary

_width = whole("hidden_size", high=1 << 20)
_period = whole("global_attn_every_n_layers", default=3, high=1024)


def _rope(fields: Fields) -> dict[str, float]:
    """Each of the two kinds of layers by its base, under the names of either generation of files."""
    found = {}
    for key, kind, name, default in (
        ("rope.freq_base", FULL, "global_rope_theta", 160000.0),
        ("rope.freq_base_swa", WINDOW, "local_rope_theta", 10000.0),
    ):
        stated = fields.object("rope_parameters").object(kind)
        if stated.get("rope_type") not in (None, "default"):
            raise UnsupportedModel(f"{fields.file}: a modern-bert can only be converted with rotations that are not stretched")
        found[key] = stated.positive("rope_theta", default=fields.positive(name, default=default))
    return found


def _check(fields: Fields) -> None:
    wanted = [WINDOW if i % _period(fields) else FULL for i in range(n_layers(fields))]
    if fields.has("layer_types") and fields.get("layer_types") != wanted:
        raise UnsupportedModel(f"{fields.file}: layer_types is {str(fields.get('layer_types'))[:100]}, not {str(wanted)[:100]}")


def _words(checkpoint: Checkpoint, n_tokens: int, ids: Mapping[str, Any]) -> Vocabulary:
    """Of bytes; every text stands between the tokens that begin and end it.

    Errors: as vocabulary.read; FileFormatError where there are no such tokens.
    """
    found = vocabulary.read(checkpoint, n_tokens, ids)
    for role in ("bos", "eos"):
        if role not in found.specials:
            raise FileFormatError(f"the checkpoint names no {role} token, which stands around every text of a modern-bert")
    found.specials["seperator"] = found.specials["eos"]  # as GGUF spells it
    found.flags |= {"add_bos_token": True, "add_eos_token": True, "add_sep_token": True}
    found.ends = []
    return found


MODERN_BERT = Family(
    architecture="modern-bert",
    layer=(
        Line("attn_norm", "attn_norm", "embd", on="normed", biased=never),
        Line("attn_qkv", "attn.Wqkv", "3*embd embd", biased=never),
        Line("attn_output", "attn.Wo", "embd embd", biased=never),
        Line("ffn_norm", "mlp_norm", "embd", biased=never),
        Line("ffn_up", "mlp.Wi", "2*ff embd", biased=never),
        Line("ffn_down", "mlp.Wo", "embd ff", biased=never),
    ),
    ends=(
        Line("token_embd", "embeddings.tok_embeddings", "vocab embd"),
        Line("token_embd_norm", "embeddings.norm", "embd"),
        Line("output_norm", "final_norm", "embd"),
    ),
    keys={
        "context_length": whole("max_position_embeddings", default=8192),
        "embedding_length": _width,
        "block_count": n_layers,
        "feed_forward_length": whole("intermediate_size", high=1 << 24),
        "attention.head_count": whole("num_attention_heads", high=1 << 16),
        "attention.layer_norm_epsilon": positive("norm_eps", default=1e-5),
        "attention.causal": lambda fields: False,
        "attention.sliding_window": whole("local_attention", default=128),
        "attention.sliding_window_pattern": _period,
        "hidden_activation": lambda fields: fields.text("hidden_activation", default="gelu"),
    },
    lengths={"embd": _width, "ff": whole("intermediate_size", high=1 << 24)},
    expects={
        "hidden_activation": ("gelu", "silu"),
        "norm_bias": (False,),
        "attention_bias": (False,),
        "mlp_bias": (False,),
    },
    rope=_rope,
    check=_check,
    kinds=lambda fields, layer: {"normed"} if layer else set(),
    roots=("model.", ""),
    table="embeddings.tok_embeddings.weight",
    # What a training task put on top.
    unused=(r"head\..*", r"decoder\..*", r"classifier\..*"),
    words=_words,
    beside=pooling,
)
