"""Gemma 2 and the text models of Gemma 3 as their authors publish them, to GGUF.

Reads config.json, tokenizer.model and the tensors. Checkpoints store norms less one. What llama.cpp takes for granted in
these architectures (which layers have a window, how scores are scaled) must be as the configuration says.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from puna.errors import FileFormatError, UnsupportedModel
from puna.gguf.convert import vocabulary
from puna.gguf.convert.checkpoint import Checkpoint, OnBytes, Tensors, ignore
from puna.gguf.convert.llama import LIMITS, MATRICES, TABLE
from puna.gguf.convert.numbers import check_range, positive
from puna.gguf.convert.output import Output, Rows, file_type, unchanged
from puna.gguf.types import ValueType
from puna.gguf.writer import GGUFWriter

_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


@dataclass(frozen=True)
class Family:
    architecture: str
    period: int  # of so many layers the last one sees everything, the others a window
    n_layers_of_largest: int  # of the model whose scores are scaled by the width of the embedding over the heads
    rope_base: float
    normalises_heads: bool


FAMILIES = {
    "Gemma2ForCausalLM": Family("gemma2", 2, 46, 10000.0, normalises_heads=False),
    "Gemma3ForCausalLM": Family("gemma3", 6, 62, 1000000.0, normalises_heads=True),
}
_LOCAL_ROPE_BASE = 10000.0


class Config(msgspec.Struct, frozen=True):
    """The part of config.json that matters."""

    architectures: list[str]
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    num_key_value_heads: int
    sliding_window: int
    query_pre_attn_scalar: float
    head_dim: int = 256
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    rope_local_base_freq: float = _LOCAL_ROPE_BASE
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    layer_types: list[str] | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    hidden_activation: str | None = "gelu_pytorch_tanh"
    use_bidirectional_attention: bool | None = False
    tie_word_embeddings: bool = True
    bos_token_id: int | list[int] | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | list[int] | None = None

    @property
    def n_kv_heads(self) -> int:
        return self.num_key_value_heads

    @property
    def head_width(self) -> int:
        return self.head_dim

    def check(self, family: Family) -> None:
        """Errors: FileFormatError naming the field; UnsupportedModel for another arithmetic than llama.cpp's."""
        check_range(self, LIMITS | {"sliding_window": 1 << 31})
        if self.num_attention_heads % self.n_kv_heads or self.head_dim % 2:
            raise FileFormatError(f"config.json: {self.num_attention_heads} heads cannot share {self.n_kv_heads} for keys")
        is_largest = self.num_hidden_layers == family.n_layers_of_largest
        scaled_by = self.hidden_size / self.num_attention_heads if is_largest else self.head_dim
        kinds = ["full_attention" if (i + 1) % family.period == 0 else "sliding_attention" for i in range(self.num_hidden_layers)]
        expected = {
            "query_pre_attn_scalar": (self.query_pre_attn_scalar, scaled_by),
            "layer_types": (self.layer_types or kinds, kinds),
            "hidden_activation": (self.hidden_activation or "gelu_pytorch_tanh", "gelu_pytorch_tanh"),
            "rope_local_base_freq": (self.rope_local_base_freq, _LOCAL_ROPE_BASE),
            "rope_parameters": (self.rope_parameters, None),
            "tie_word_embeddings": (self.tie_word_embeddings, True),
            "use_bidirectional_attention": (bool(self.use_bidirectional_attention), False),
        }
        for name, (found, wanted) in expected.items():
            if found != wanted:
                what = f"config.json: {name} is {str(found)[:100]}"
                raise UnsupportedModel(f"{what}; a {family.architecture} can only be converted with {str(wanted)[:100]}")


class _Architectures(msgspec.Struct, frozen=True):
    architectures: list[str]


def convert(checkpoint: Checkpoint, target: Path, on_bytes: OnBytes = ignore) -> None:
    """Write *target* from a checkpoint.

    Errors: FileFormatError naming file and tensor; UnsupportedModel for what has no counterpart in GGUF.
    """
    names = checkpoint.decoded("config.json", _Architectures).architectures
    family = FAMILIES.get(names[0] if names else "")
    if family is None:
        raise UnsupportedModel(f"config.json: architecture {names[:1]} is none of {', '.join(FAMILIES)}")
    config = checkpoint.decoded("config.json", Config)
    config.check(family)
    with checkpoint.tensors() as tensors:
        n_tokens = vocabulary.n_embeddings(tensors, TABLE, config.hidden_size)
        words = vocabulary.read(checkpoint, n_tokens, msgspec.structs.asdict(config))
        writer = GGUFWriter(family.architecture)
        writer.add("general.file_type", file_type(tensors, TABLE), ValueType.UINT32)
        _add_options(writer, family, config, n_tokens)
        words.add_to(writer)
        output = Output(writer, tensors)
        for name, (source, shape) in _layout(family, config, n_tokens, tensors).items():
            output.add(name, source, shape, _plus_one if len(shape) == 1 else unchanged)
        output.write(target, on_bytes)


def _plus_one(norm: Rows) -> Rows:
    return np.asarray(norm + np.float32(1))


def _add_options(writer: GGUFWriter, family: Family, config: Config, n_tokens: int) -> None:
    numbers = {
        "vocab_size": n_tokens,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.n_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.sliding_window": config.sliding_window,
    }
    stated: dict[str, Any] = msgspec.structs.asdict(config)
    values: dict[str, Any] = {
        "attention.layer_norm_rms_epsilon": positive(stated, "rms_norm_eps"),
        "rope.freq_base": family.rope_base if config.rope_theta is None else positive(stated, "rope_theta"),
    }
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if stated[name] is not None:
            values[name] = positive(stated, name)
    values |= _scaling(config.rope_scaling or {})
    if family.architecture == "gemma2" and {"attn_logit_softcapping", "final_logit_softcapping"} - set(values):
        raise UnsupportedModel("config.json: a gemma2 can only be converted with both of its caps")
    if family.architecture == "gemma3" and "attn_logit_softcapping" in values:
        raise UnsupportedModel("config.json: a gemma3 can only be converted without attn_logit_softcapping")
    for key, whole in numbers.items():
        writer.add(f"{family.architecture}.{key}", whole, ValueType.UINT32)
    for key, value in values.items():
        writer.add(f"{family.architecture}.{key}", value)


def _scaling(rope: dict[str, Any]) -> dict[str, Any]:
    kind = rope.get("rope_type", rope.get("type", "default")) or "default"
    if kind not in ("default", "linear"):
        raise UnsupportedModel(f"config.json: a rotation of type {str(kind)[:40]!r} cannot be converted")
    return {"rope.scaling.type": "linear", "rope.scaling.factor": positive(rope, "factor")} if kind == "linear" else {}


def _layout(family: Family, config: Config, n_tokens: int, tensors: Tensors) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Every tensor of the GGUF file: tensor of the checkpoint, and its shape.

    Errors: UnsupportedModel naming a tensor of the checkpoint that has no place in it.
    """
    width, inner = config.hidden_size, config.intermediate_size
    q_width, kv_width = config.num_attention_heads * config.head_dim, config.n_kv_heads * config.head_dim
    places: dict[str, tuple[str, tuple[int, ...]]] = {
        "token_embd.weight": (TABLE, (n_tokens, width)),
        "output_norm.weight": ("model.norm.weight", (width,)),
    }
    shapes = {
        "attn_q": (q_width, width),
        "attn_k": (kv_width, width),
        "attn_v": (kv_width, width),
        "attn_output": (width, q_width),
        "ffn_gate": (inner, width),
        "ffn_up": (inner, width),
        "ffn_down": (width, inner),
    }
    parts: dict[str, tuple[str, tuple[int, ...]]] = {name: (MATRICES[name], shape) for name, shape in shapes.items()}
    parts |= {name: (theirs, (width,)) for name, theirs in _NORMS.items()}
    if family.normalises_heads:
        parts |= {name: (theirs, (config.head_dim,)) for name, theirs in _HEAD_NORMS.items()}
    for i in range(config.num_hidden_layers):
        for name, (theirs, shape) in parts.items():
            places[f"blk.{i}.{name}.weight"] = (f"model.layers.{i}.{theirs}.weight", shape)
    known = {source for source, _ in places.values()} | {"lm_head.weight"}
    unknown = [name for name in tensors if name not in known]
    if unknown:
        raise UnsupportedModel(
            f"{tensors.home(unknown[0]).name}: tensor {unknown[0][:200]} has no place in a {family.architecture} of "
            f"{config.num_hidden_layers} layers"
        )
    return places
