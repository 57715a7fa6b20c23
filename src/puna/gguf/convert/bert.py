"""A BERT sentence encoder as sentence-transformers stores it, to GGUF.

Reads config.json, vocab.txt or tokenizer.json, the description of the pooling, and the tensors.
Source: the names and keys are llama.cpp's for this architecture.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from puna.errors import FileFormatError, UnsupportedModel
from puna.gguf.convert.checkpoint import Checkpoint, OnBytes, Tensors, ignore
from puna.gguf.convert.output import Output, file_type
from puna.gguf.convert.vocabulary import CONTROL, NORMAL, UNKNOWN
from puna.gguf.types import ValueType
from puna.gguf.writer import GGUFWriter

MAX_LAYERS = 1024


class Config(msgspec.Struct, frozen=True):
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


class PoolingConfig(msgspec.Struct, frozen=True):
    """1_Pooling/config.json"""

    pooling_mode_cls_token: bool = False
    pooling_mode_mean_tokens: bool = False
    pooling_mode_lasttoken: bool = False


class _Module(msgspec.Struct, frozen=True):
    """One line of modules.json: what a sentence-transformers model consists of."""

    path: str
    type: str


class _WordPiece(msgspec.Struct, frozen=True):
    vocab: dict[str, int]
    type: str = ""


class _Normalizer(msgspec.Struct, frozen=True):
    lowercase: bool = True
    strip_accents: bool | None = None  # None: as with lower case


class _TokenizerFile(msgspec.Struct, frozen=True):
    """The part of tokenizer.json that matters."""

    model: _WordPiece = _WordPiece({})
    normalizer: _Normalizer | None = None


class _TokenizerConfig(msgspec.Struct, frozen=True):
    """The part of tokenizer_config.json that matters."""

    do_lower_case: bool = True
    strip_accents: bool | None = None


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
_MODULES = (".Transformer", ".Pooling", ".Normalize")  # all that a sentence encoder may consist of
_SPECIAL = {
    "padding": "[PAD]",
    "unknown": "[UNK]",
    "cls": "[CLS]",
    "bos": "[CLS]",
    "seperator": "[SEP]",
    "eos": "[SEP]",
    "mask": "[MASK]",
}


def convert(checkpoint: Checkpoint, target: Path, on_bytes: OnBytes = ignore) -> None:
    """Write *target* from a checkpoint.

    Errors: FileFormatError naming the file; UnsupportedModel for a BERT of another build.
    """
    config = _config(checkpoint)
    pooling, pieces, normalizer = _pooling(checkpoint), _pieces(checkpoint), _normalizer(checkpoint)
    writer = GGUFWriter("bert")
    with checkpoint.tensors() as tensors:
        prefix = "bert." if "bert.embeddings.word_embeddings.weight" in tensors else ""
        words = f"{prefix}embeddings.word_embeddings.weight"
        _add_options(writer, config, pooling, file_type(tensors, words))
        _add_vocabulary(writer, pieces, normalizer)
        output = Output(writer, tensors)
        _add_tensors(output, prefix, config, _n_words(tensors, words, len(pieces)))
        output.write(target, on_bytes)


def _config(checkpoint: Checkpoint) -> Config:
    config = checkpoint.decoded("config.json", Config)
    built = (config.model_type, config.hidden_act, config.position_embedding_type)
    if config.model_type != "bert" or config.hidden_act not in ("gelu", "gelu_new") or built[2] != "absolute":
        raise UnsupportedModel(f"config.json: a BERT with {', '.join(built)} cannot be converted")
    if not 0 < config.num_hidden_layers <= MAX_LAYERS:
        raise FileFormatError(f"config.json: num_hidden_layers is {config.num_hidden_layers}")
    if not 0 < config.layer_norm_eps < 1:
        raise FileFormatError(f"config.json: layer_norm_eps is {config.layer_norm_eps}")
    return config


def _pooling(checkpoint: Checkpoint) -> int:
    """The number GGUF has for it; a checkpoint without a word about it is pooled by the mean, as the field does."""
    name = "1_Pooling/config.json"
    if checkpoint.has("modules.json"):
        modules = checkpoint.decoded("modules.json", list[_Module])
        if not any(module.type.endswith(".Pooling") and module.path == "1_Pooling" for module in modules):
            raise UnsupportedModel("modules.json names no pooling in 1_Pooling")
        for module in modules:
            if not module.type.endswith(_MODULES):
                raise UnsupportedModel(f"modules.json: a module {module.type[:100]} cannot be converted")
    elif not checkpoint.has(name):
        return 1
    config = checkpoint.decoded(name, PoolingConfig)
    chosen = (config.pooling_mode_mean_tokens, config.pooling_mode_cls_token, config.pooling_mode_lasttoken)
    if sum(chosen) != 1:
        raise UnsupportedModel(f"{name}: of the poolings mean, first and last token exactly one can be converted")
    return 1 + chosen.index(True)


def _add_options(writer: GGUFWriter, config: Config, pooling: int, file_type: int) -> None:
    writer.add("general.file_type", file_type)
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


def _pieces(checkpoint: Checkpoint) -> list[str]:
    """The vocabulary by token, from vocab.txt or tokenizer.json.

    Errors: FileFormatError.
    """
    if not checkpoint.has("vocab.txt") and checkpoint.has("tokenizer.json"):
        model = checkpoint.decoded("tokenizer.json", _TokenizerFile).model
        pieces = sorted(model.vocab, key=model.vocab.__getitem__)
        if model.type not in ("", "WordPiece") or sorted(model.vocab.values()) != list(range(len(pieces))):
            raise UnsupportedModel("tokenizer.json: no WordPiece vocabulary with a piece for every number")
        name = "tokenizer.json"
    else:
        name = "vocab.txt"
        pieces = [piece.rstrip("\r") for piece in checkpoint.read(name).decode("utf-8", "replace").split("\n")]
        pieces = pieces[:-1] if not pieces[-1] else pieces
    missing = [piece for piece in dict.fromkeys(_SPECIAL.values()) if piece not in pieces]
    if missing:
        raise FileFormatError(f"{name}: the vocabulary lacks {', '.join(missing)}")
    return pieces


def _normalizer(checkpoint: Checkpoint) -> _Normalizer | None:
    """What happens to letters before the vocabulary sees them; None when nothing says it."""
    found = checkpoint.decoded("tokenizer.json", _TokenizerFile).normalizer if checkpoint.has("tokenizer.json") else None
    if found is None and checkpoint.has("tokenizer_config.json"):
        config = checkpoint.decoded("tokenizer_config.json", _TokenizerConfig)
        found = _Normalizer(config.do_lower_case, config.strip_accents)
    return found


def _add_vocabulary(writer: GGUFWriter, pieces: list[str], normalizer: _Normalizer | None) -> None:
    """WordPiece pieces, with U+2581 before those that begin a word instead of ## before those that do not."""
    ids = {piece: number for number, piece in enumerate(pieces)}
    kinds = [NORMAL] * len(pieces)
    for piece in _SPECIAL.values():
        kinds[ids[piece]] = UNKNOWN if piece == "[UNK]" else CONTROL
    writer.add("tokenizer.ggml.model", "bert")
    writer.add("tokenizer.ggml.pre", "default")
    writer.add("tokenizer.ggml.tokens", [_marked(piece) for piece in pieces])
    writer.add("tokenizer.ggml.token_type", kinds, element=ValueType.INT32)
    for role, piece in _SPECIAL.items():
        writer.add(f"tokenizer.ggml.{role}_token_id", ids[piece], ValueType.UINT32)
    if normalizer is not None:
        writer.add("tokenizer.ggml.normalizer.lowercase", normalizer.lowercase)
        if normalizer.strip_accents is not None:
            writer.add("tokenizer.ggml.normalizer.strip_accents", normalizer.strip_accents)


def _marked(piece: str) -> str:
    if piece.startswith("[") and piece.endswith("]") and len(piece) > 2:
        return piece
    return piece[2:] if piece.startswith("##") and len(piece) > 2 else "\u2581" + piece


def _n_words(tensors: Tensors, name: str, n_pieces: int) -> int:
    """Rows of the table of embeddings: some have more than the vocabulary needs."""
    n_rows = (*tensors.stored(name).shape, 0)[0]
    if n_rows < n_pieces:
        raise FileFormatError(f"{tensors.home(name).name}: {n_rows} embeddings for a vocabulary of {n_pieces}")
    return n_rows


def _add_tensors(output: Output, prefix: str, config: Config, n_words: int) -> None:
    width, inner = config.hidden_size, config.intermediate_size
    tables = {"word": n_words, "position": config.max_position_embeddings, "token_type": config.type_vocab_size}
    for name, ours in _EMBEDDINGS.items():
        table = name.removesuffix("_embeddings.weight")
        shape = (tables[table], width) if table in tables else (width,)
        output.add(ours, f"{prefix}embeddings.{name}", shape, is_exact=ours in _TABLES)
    for i in range(config.num_hidden_layers):
        for name, ours in _LAYER.items():
            n_out = inner if ours == "ffn_up" else width
            n_in = inner if ours == "ffn_down" else width
            weight = (n_out,) if ours.endswith("norm") else (n_out, n_in)
            for part, shape in (("weight", weight), ("bias", (n_out,))):
                output.add(f"blk.{i}.{ours}.{part}", f"{prefix}encoder.layer.{i}.{name}.{part}", shape)
