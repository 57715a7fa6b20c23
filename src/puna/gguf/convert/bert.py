"""A BERT sentence encoder as sentence-transformers stores it, to GGUF.

Reads config.json, model.safetensors, vocab.txt and the description of the pooling. Matrices become F16, all else F32.
Source: the names and keys are llama.cpp's for this architecture.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from puna.errors import FileFormatError, UnsupportedModel
from puna.gguf.convert.safetensors import SafetensorsFile
from puna.gguf.types import ValueType
from puna.gguf.writer import GGUFWriter

T = TypeVar("T")

MAX_TEXT_BYTES = 64 << 20
NORMAL, UNKNOWN, CONTROL = 1, 2, 3  # token types as GGUF numbers them
_FILE_TYPE_F16 = 1


class Config(msgspec.Struct):
    """The part of config.json that matters."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    layer_norm_eps: float = 1e-12
    type_vocab_size: int = 2
    hidden_act: str = "gelu"
    position_embedding_type: str = "absolute"
    model_type: str = "bert"


class PoolingConfig(msgspec.Struct):
    """1_Pooling/config.json"""

    pooling_mode_cls_token: bool = False
    pooling_mode_mean_tokens: bool = False
    pooling_mode_lasttoken: bool = False


class _Module(msgspec.Struct):
    """One line of modules.json: what a sentence-transformers model consists of."""

    path: str
    type: str


# Parts of a layer: name in the checkpoint, name in GGUF.
_LAYER = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
_EMBEDDINGS = {
    "word_embeddings.weight": "token_embd.weight",
    "position_embeddings.weight": "position_embd.weight",
    "token_type_embeddings.weight": "token_types.weight",
    "LayerNorm.weight": "token_embd_norm.weight",
    "LayerNorm.bias": "token_embd_norm.bias",
}
_TABLES = ("position_embd.weight", "token_types.weight")  # too small to be worth rounding
_SPECIAL = {
    "padding": "[PAD]",
    "unknown": "[UNK]",
    "cls": "[CLS]",
    "bos": "[CLS]",
    "seperator": "[SEP]",
    "eos": "[SEP]",
    "mask": "[MASK]",
}


def convert(folder: Path, target: Path) -> None:
    """Write *target* from a checkpoint's folder.

    Errors: FileFormatError naming the file; UnsupportedModel for a BERT of another build.
    """
    config = _config(folder)
    writer = GGUFWriter("bert")
    _add_options(writer, config, _pooling(folder))
    n_tokens = _add_vocabulary(writer, folder / "vocab.txt")
    with SafetensorsFile(folder / "model.safetensors") as file:
        _add_tensors(writer, file, config, n_tokens)
        writer.write(target)


def _config(folder: Path) -> Config:
    config = _decoded(folder / "config.json", Config)
    built = (config.model_type, config.hidden_act, config.position_embedding_type)
    if config.model_type != "bert" or config.hidden_act not in ("gelu", "gelu_new") or built[2] != "absolute":
        raise UnsupportedModel(f"{folder}: a BERT with {', '.join(built)} cannot be converted")
    return config


def _pooling(folder: Path) -> int:
    """The number GGUF has for it; a checkpoint without a word about it is pooled by the mean, as the field does."""
    path = folder / "1_Pooling" / "config.json"
    if (folder / "modules.json").exists():
        modules = _decoded(folder / "modules.json", list[_Module])
        if not any(module.type.endswith(".Pooling") and module.path == "1_Pooling" for module in modules):
            raise UnsupportedModel(f"{folder}: modules.json names no pooling in 1_Pooling")
    elif not path.exists():
        return 1
    config = _decoded(path, PoolingConfig)
    chosen = (config.pooling_mode_mean_tokens, config.pooling_mode_cls_token, config.pooling_mode_lasttoken)
    if sum(chosen) != 1:
        raise UnsupportedModel(f"{path}: of the poolings mean, first and last token exactly one can be converted")
    return 1 + chosen.index(True)


def _add_options(writer: GGUFWriter, config: Config, pooling: int) -> None:
    writer.add("general.file_type", _FILE_TYPE_F16)
    numbers = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "pooling_type": pooling,
    }
    for key, number in numbers.items():
        writer.add(f"bert.{key}", number, ValueType.UINT32)
    writer.add("bert.attention.layer_norm_epsilon", config.layer_norm_eps, ValueType.FLOAT32)
    writer.add("bert.attention.causal", False)
    writer.add("tokenizer.ggml.token_type_count", config.type_vocab_size, ValueType.UINT32)


def _add_vocabulary(writer: GGUFWriter, path: Path) -> int:
    """WordPiece pieces, with U+2581 before those that begin a word instead of ## before those that do not."""
    pieces = _read(path).decode("utf-8", "replace").split("\n")
    pieces = pieces[:-1] if not pieces[-1] else pieces
    ids = {piece: number for number, piece in enumerate(pieces)}
    missing = [piece for piece in dict.fromkeys(_SPECIAL.values()) if piece not in ids]
    if missing:
        raise FileFormatError(f"{path}: the vocabulary lacks {', '.join(missing)}")
    kinds = [NORMAL] * len(pieces)
    for piece in _SPECIAL.values():
        kinds[ids[piece]] = UNKNOWN if piece == "[UNK]" else CONTROL
    writer.add("tokenizer.ggml.model", "bert")
    writer.add("tokenizer.ggml.pre", "default")
    writer.add("tokenizer.ggml.tokens", [_marked(piece.rstrip("\r")) for piece in pieces])
    writer.add("tokenizer.ggml.token_type", kinds, element=ValueType.INT32)
    for role, piece in _SPECIAL.items():
        writer.add(f"tokenizer.ggml.{role}_token_id", ids[piece], ValueType.UINT32)
    return len(pieces)


def _marked(piece: str) -> str:
    if piece.startswith("[") and piece.endswith("]") and len(piece) > 2:
        return piece
    return piece[2:] if piece.startswith("##") and len(piece) > 2 else "\u2581" + piece


def _add_tensors(writer: GGUFWriter, file: SafetensorsFile, config: Config, n_tokens: int) -> None:
    prefix = "bert." if "bert.embeddings.word_embeddings.weight" in file.tensors else ""
    names = {f"{prefix}embeddings.{name}": ours for name, ours in _EMBEDDINGS.items()}
    for i in range(config.num_hidden_layers):
        for name, ours in _LAYER.items():
            for part in ("weight", "bias"):
                names[f"{prefix}encoder.layer.{i}.{name}.{part}"] = f"blk.{i}.{ours}.{part}"
    for name, ours in names.items():
        values = file.floats(name)
        if values.ndim not in (1, 2) or not values.size:
            raise FileFormatError(f"{file.path}: tensor {name} has the shape {list(values.shape)}")
        if ours == "token_embd.weight" and len(values) < n_tokens:
            raise FileFormatError(f"{file.path}: {len(values)} embeddings for a vocabulary of {n_tokens}")
        is_matrix = values.ndim == 2 and ours not in _TABLES
        writer.add_tensor(ours, _halved(values, name) if is_matrix else values)


def _halved(values: npt.NDArray[np.float32], name: str) -> npt.NDArray[np.float16]:
    if np.abs(values).max(initial=0.0) > np.finfo(np.float16).max:
        raise UnsupportedModel(f"tensor {name} has values that a 16-bit number cannot hold")
    return values.astype(np.float16)


def _decoded(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(_read(path), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FileFormatError(f"{path}: {error}") from error


def _read(path: Path) -> bytes:
    """Errors: FileFormatError when the file is missing or too large for a text."""
    try:
        if path.stat().st_size > MAX_TEXT_BYTES:
            raise FileFormatError(f"{path}: larger than {MAX_TEXT_BYTES} bytes")
        return path.read_bytes()
    except OSError as error:
        raise FileFormatError(f"{path}: {error.strerror}") from error
