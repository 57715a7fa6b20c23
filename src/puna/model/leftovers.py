"""What a file holds and a model class passes over: what of it must not be passed over, and what may be.

The judge is llama.cpp. A tensor that nobody asked for, and a key that it computes with and nobody read, is a reason not to
run the file here; so is a tensor that it loads and leaves out of its arithmetic, where the same declaration would use it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

from puna.gguf.layers import n_stored_layers
from puna.gguf.metadata import LazyArray
from puna.gguf.reader import GGUFFile
from puna.gguf.types import TensorType
from puna.model.pooling import Pooling, pooling_of

# Tensors that may stay unused, and why.
HARMLESS_TENSORS: Mapping[str, str] = {
    r".+\.input_scale": "of activations, for devices that multiply in four bits; llama.cpp loads and does not use them",
    r"(v|a|mm|s)\..+": "sees images or hears sound, in files that hold both parts; text does not go through it",
    r"(mtp|nextn)\..+": "guesses further tokens, and takes no part in the next one",
}

_DENSE = ("ffn_gate.scale", "ffn_up.scale", "ffn_down.scale")
_ROUTED = ("ffn_gate_exps.scale", "ffn_up_exps.scale", "ffn_down_exps.scale")
_SHARED = ("ffn_gate_shexp.scale", "ffn_up_shexp.scale", "ffn_down_shexp.scale")

# Tensors that llama.cpp loads and does not compute with, by architecture.
LEFT_OUT: Mapping[str, tuple[str, ...]] = {
    "bert": _DENSE,
    "command-r": _DENSE,
    "deepseek2": (*_DENSE, *_ROUTED, *_SHARED),
    "falcon-h1": (*_DENSE, "attn_output.bias", "rope_freqs.weight"),
    "gemma": _DENSE,
    "gemma2": _DENSE,
    "gemma3": _DENSE,
    "gemma-embedding": _DENSE,
    "gemma3n": (*_DENSE, "attn_q.scale"),
    "glm4": _DENSE,
    "glm4moe": (*_DENSE, *_ROUTED, *_SHARED),
    "glm4moelite": (*_DENSE, *_ROUTED, *_SHARED),
    "gpt-oss": _ROUTED,
    "granite": (*_DENSE, *_ROUTED, *_SHARED),
    "granitehybrid": (*_DENSE, *_ROUTED, *_SHARED),
    "granitemoe": (*_DENSE, *_ROUTED, *_SHARED),
    "lfm2": _DENSE,
    "lfm2moe": (*_DENSE, *_ROUTED),
    "llama4": (*_DENSE, *_ROUTED, *_SHARED),
    "modern-bert": _DENSE,
    "nomic-bert": _DENSE,
    "olmo2": _DENSE,
    "olmo3": _DENSE,
    "phi3": _DENSE,
    "qwen2": _DENSE,
    "qwen25vl": (*_DENSE, "output.bias"),
    "qwen2moe": (*_ROUTED, *_SHARED),
    "qwen2vl": (*_DENSE, "output.bias"),
    "qwen3next": ("attn_qkv.scale", "attn_gate.scale", "ssm_in.scale", "ssm_out.scale"),
    "qwen3vl": _DENSE,
    "qwen3vlmoe": _ROUTED,
    "starcoder2": _DENSE,
}


def _same_as(*keys: str) -> Callable[[Any, GGUFFile], bool]:
    """As the first of these keys that is there states it: one length for all layers. Or 0."""

    def is_same(value: Any, file: GGUFFile) -> bool:
        meta = file.metadata
        stated = next((meta[meta.full_key(key)] for key in keys if meta.has(key)), None)
        return value in (0, stated)

    return is_same


def _is_none(value: Any, file: GGUFFile) -> bool:
    return value in (0, -1, 0xFFFFFFFF)


def _is_as_expected(value: Any, file: GGUFFile) -> bool:
    """Encoders see what follows, decoders do not."""
    is_encoder = file.architecture in _ENCODERS or (file.architecture == "gemma3" and pooling_of(file) is not Pooling.NONE)
    return value is not is_encoder


def _moves_no_text(value: Any, file: GGUFFile) -> bool:
    """Text has the same position along three axes and 0 along the fourth."""
    return not isinstance(value, LazyArray) or not any(value[3:4])


def _selects_no_layer(value: Any, file: GGUFFile) -> bool:
    return isinstance(value, LazyArray) and all(index < 0 for index in value)


_ENCODERS = ("bert", "modern-bert", "nomic-bert", "gemma-embedding")

# Keys that llama.cpp computes with, whatever the architecture, and when they say nothing new to a class that does not
# read them. The others that it reads are lengths and lists that the tensors tell as well.
KEYS: Mapping[str, Callable[[Any, GGUFFile], bool]] = {
    "attention.causal": _is_as_expected,
    "attention.key_length_swa": _same_as("attention.key_length"),
    "attention.value_length_swa": _same_as("attention.value_length"),
    "classifier.pooling_type": _is_none,
    "embedding_length_out": _same_as("embedding_length"),
    "rope.dimension_count_swa": _same_as("rope.dimension_count", "attention.key_length"),
}

# Those of single architectures.
KEYS_OF: Mapping[str, Mapping[str, Callable[[Any, GGUFFile], bool]]] = {
    "glm4moe": {"rope.dimension_sections": _moves_no_text},
    "granite": {"deepstack_mapping": _selects_no_layer},
}

# Beside the architecture's own: which products must not be computed in four bits.
PRECISIONS = "general.tensor_extra.prec_a4"


def reason_against(file: GGUFFile, read: Set[str], taken: Set[str]) -> str:
    """Why a class that read these keys and took these tensors must not run the file; empty if nothing is against it."""
    return _left_out(file) or _not_taken(file, taken) or _not_read(file, read)


def _left_out(file: GGUFFile) -> str:
    kinds = LEFT_OUT.get(file.architecture, ())
    found = [name for name in file.tensors if re.sub(r"^blk\.\d+\.", "", name) in kinds and not _belongs_to_encoding(file, name)]
    return f"{_named('tensor', found)}, which llama.cpp loads and leaves out in {file.architecture}" if found else ""


def _belongs_to_encoding(file: GGUFFile, name: str) -> bool:
    """Numbers in NVFP4 mean nothing without their factor, whatever llama.cpp makes of them."""
    matrix = file.tensors.get(name.removesuffix(".scale") + ".weight")
    return name.endswith(".scale") and matrix is not None and matrix.type is TensorType.NVFP4


def _not_taken(file: GGUFFile, taken: Set[str]) -> str:
    harmless = re.compile("|".join(_harmless(file)))
    found = [name for name in file.tensors if name not in taken and not harmless.fullmatch(name) and not _is_beyond(file, name)]
    return f"{_named('tensor', found)}, which Puna's engine does not compute with in {file.architecture}" if found else ""


def _harmless(file: GGUFFile) -> Iterable[str]:
    yield from HARMLESS_TENSORS
    if pooling_of(file) is not Pooling.RANK:
        yield r"cls\..+"  # gives scores, which nobody asks for


def _is_beyond(file: GGUFFile, name: str) -> bool:
    """Of a layer at the end that only guesses further tokens."""
    layer = re.match(r"blk\.(\d+)\.", name)
    n_layers = n_stored_layers(file.metadata)
    n_guessing = file.metadata.integer("nextn_predict_layers", 0)
    return layer is not None and n_layers - n_guessing <= int(layer[1]) < n_layers


def _not_read(file: GGUFFile, read: Set[str]) -> str:
    meta = file.metadata
    rules = {**KEYS, **KEYS_OF.get(file.architecture, {})}
    for key, says_nothing in rules.items():
        full = meta.full_key(key)
        if full in meta and full not in read and not says_nothing(meta[full], file):
            return f"key {full}, which Puna's engine does not read"
    if PRECISIONS in meta and not all(meta.array(PRECISIONS)):
        return f"key {PRECISIONS}, which Puna's engine does not read"
    return ""


def _named(kind: str, names: list[str]) -> str:
    return f"{kind} {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
