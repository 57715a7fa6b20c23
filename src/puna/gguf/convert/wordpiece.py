"""WordPiece vocabularies, from the files of a checkpoint to the keys of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from puna.errors import FileFormatError, UnsupportedModel
from puna.gguf.convert.checkpoint import Checkpoint
from puna.gguf.convert.fields import Fields
from puna.gguf.convert.vocabulary import CONTROL, NORMAL, UNKNOWN, UNUSED
from puna.gguf.types import ValueType
from puna.gguf.writer import GGUFWriter


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


_SPECIAL = {
    "padding": "[PAD]",
    "unknown": "[UNK]",
    "cls": "[CLS]",
    "bos": "[CLS]",
    "seperator": "[SEP]",
    "eos": "[SEP]",
    "mask": "[MASK]",
}


@dataclass(frozen=True)
class WordPieces:
    pieces: list[str]
    n_rows: int  # of the table of embeddings; some have more than the vocabulary needs
    n_types: int
    normalizer: _Normalizer | None

    def number_of(self, text: str) -> int | None:
        return self.pieces.index(text) if text in self.pieces else None

    def add_to(self, writer: GGUFWriter) -> None:
        """With U+2581 before pieces that begin a word instead of ## before those that do not."""
        ids = {piece: number for number, piece in enumerate(self.pieces)}
        kinds = [NORMAL] * len(self.pieces)
        for piece in _SPECIAL.values():
            kinds[ids[piece]] = UNKNOWN if piece == "[UNK]" else CONTROL
        unused = range(len(self.pieces), self.n_rows)
        writer.add("tokenizer.ggml.model", "bert")
        writer.add("tokenizer.ggml.pre", "default")
        writer.add("tokenizer.ggml.token_type_count", self.n_types, ValueType.UINT32)
        writer.add("tokenizer.ggml.tokens", [*(_marked(piece) for piece in self.pieces), *(f"[unused_{n}]" for n in unused)])
        writer.add("tokenizer.ggml.token_type", kinds + [UNUSED] * len(unused), element=ValueType.INT32)
        for role, piece in _SPECIAL.items():
            writer.add(f"tokenizer.ggml.{role}_token_id", ids[piece], ValueType.UINT32)
        if self.normalizer is not None:
            writer.add("tokenizer.ggml.normalizer.lowercase", self.normalizer.lowercase)
            if self.normalizer.strip_accents is not None:
                writer.add("tokenizer.ggml.normalizer.strip_accents", self.normalizer.strip_accents)


def read(checkpoint: Checkpoint, n_rows: int, ids: Mapping[str, Any]) -> WordPieces:
    """The vocabulary for a table of *n_rows* embeddings.

    Errors: FileFormatError naming the file; UnsupportedModel.
    """
    pieces = _pieces(checkpoint)
    if n_rows < len(pieces):
        raise FileFormatError(f"the checkpoint has {n_rows} embeddings for a vocabulary of {len(pieces)}")
    return WordPieces(pieces, n_rows, Fields(ids).whole("type_vocab_size", default=2), _normalizer(checkpoint))


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


def _marked(piece: str) -> str:
    if piece.startswith("[") and piece.endswith("]") and len(piece) > 2:
        return piece
    return piece[2:] if piece.startswith("##") and len(piece) > 2 else "\u2581" + piece
