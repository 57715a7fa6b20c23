"""Sentence encoders: BERT (MiniLM, BGE, E5, Arctic Embed, …) and Nomic BERT (nomic-embed-text)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from puna.gguf.convert import wordpiece
from puna.gguf.convert.fields import Fields
from puna.gguf.convert.pooling import pooling
from puna.gguf.convert.table import Family, Line, Value, always, whole


def _eps(fields: Fields) -> float:
    found = fields.positive("layer_norm_eps", "layer_norm_epsilon", default=1e-12)
    if found >= 1:
        raise fields.wrong("layer_norm_eps", found, "not below 1")
    return found


_width = whole("hidden_size", "n_embd", high=1 << 20)
_inner = whole("intermediate_size", "n_inner", high=1 << 24)
_n_layers = whole("num_hidden_layers", "n_layer", high=1024)
_n_positions = whole("max_trained_positions", "max_position_embeddings", "n_positions")

_KEYS: Mapping[str, Value] = {
    "vocab_size": lambda fields: None,
    "context_length": _n_positions,
    "embedding_length": _width,
    "block_count": _n_layers,
    "feed_forward_length": _inner,
    "attention.head_count": whole("num_attention_heads", "n_head", high=1 << 16),
    "attention.layer_norm_epsilon": _eps,
    "attention.causal": lambda fields: False,
}
_LENGTHS: Mapping[str, Value] = {
    "embd": _width,
    "ff": _inner,
    "positions": _n_positions,
    "types": whole("type_vocab_size", default=2),
}


BERT = Family(
    architecture="bert",
    layer=(
        Line("attn_q", "attention.self.query", "embd embd", biased=always),
        Line("attn_k", "attention.self.key", "embd embd", biased=always),
        Line("attn_v", "attention.self.value", "embd embd", biased=always),
        Line("attn_output", "attention.output.dense", "embd embd", biased=always),
        Line("attn_output_norm", "attention.output.LayerNorm", "embd", biased=always),
        Line("ffn_up", "intermediate.dense", "ff embd", biased=always),
        Line("ffn_down", "output.dense", "embd ff", biased=always),
        Line("layer_output_norm", "output.LayerNorm", "embd", biased=always),
    ),
    ends=(
        Line("token_embd", "embeddings.word_embeddings", "vocab embd"),
        Line("position_embd", "embeddings.position_embeddings", "positions embd", exact=True),
        Line("token_types", "embeddings.token_type_embeddings", "types embd", exact=True),
        Line("token_embd_norm", "embeddings.LayerNorm", "embd", biased=always),
    ),
    keys=_KEYS,
    lengths=_LENGTHS,
    expects={"model_type": ("bert",), "hidden_act": ("gelu", "gelu_new"), "position_embedding_type": ("absolute",)},
    layers="encoder.layer.{i}.",
    n_layers=_n_layers,
    roots=("", "bert."),
    table="embeddings.word_embeddings.weight",
    # What a training task put on top, and numbers that are counted anew.
    unused=(r"(bert\.)?pooler\..*", r"cls\..*", r"(bert\.)?embeddings\.position_ids"),
    words=wordpiece.read,
    beside=pooling,
)


def _rope(fields: Fields) -> dict[str, float]:
    stated = fields.object("rope_parameters", "rope_scaling")
    base = fields.positive("rotary_emb_base", "rope_theta", default=1000.0)
    return {"rope.freq_base": stated.positive("rope_theta", default=base)}


NOMIC_BERT = replace(
    BERT,
    architecture="nomic-bert",
    layer=(
        Line("attn_qkv", "attn.Wqkv", "3*embd embd"),
        Line("attn_output", "attn.out_proj", "embd embd"),
        Line("attn_output_norm", "norm1", "embd", biased=always),
        Line("ffn_up", "mlp.fc11", "ff embd"),
        Line("ffn_gate", "mlp.fc12", "ff embd"),
        Line("ffn_down", "mlp.fc2", "embd ff"),
        Line("layer_output_norm", "norm2", "embd", biased=always),
    ),
    ends=(
        BERT.ends[0],
        BERT.ends[2],
        Line("token_embd_norm", "emb_ln", "embd", biased=always),
    ),
    expects={
        "activation_function": ("swiglu",),
        "hidden_act": ("silu",),
        "rotary_emb_fraction": (1.0, 1),
        "rotary_emb_interleaved": (False,),
        "prenorm": (False,),
        "qkv_proj_bias": (False,),
        "mlp_fc1_bias": (False,),
        "mlp_fc2_bias": (False,),
        "num_experts": (0,),
        "rotary_scaling_factor": (),
    },
    rope=_rope,
    layers="encoder.layers.{i}.",
    roots=("", "bert."),
)
