"""The vocabulary in a SentencePiece model file (``tokenizer.model``), read without its library.

The file is a protocol buffer. Only the few fields below are looked at, all others are stepped over, and every length is
held against the bytes that are left.
Source: sentencepiece_model.proto of the SentencePiece project, and the encoding of protocol buffers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from puna.errors import FileFormatError, UnsupportedModel

MAX_PIECES = 1 << 21
BPE = 2  # of the kinds of models: unigram 1, BPE 2, word 3, character 4
_UNIGRAM = 1

# Fields of ModelProto, and of the messages in it.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE_TEXT, _PIECE_SCORE, _PIECE_KIND = 1, 2, 3
_TRAINER_MODEL_KIND = 3
_NORMALIZER_ADD_DUMMY_PREFIX = 3
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types


@dataclass(frozen=True)
class Piece:
    text: bytes
    score: float
    kind: int  # the numbers are those of GGUF's token types: 1 normal, 2 unknown, 3 control, 4 user defined, 6 byte


@dataclass(frozen=True)
class SentencePieceModel:
    pieces: list[Piece]
    adds_space_prefix: bool


def read(content: bytes, name: str) -> SentencePieceModel:
    """Errors: FileFormatError; UnsupportedModel for a model that does not merge pairs."""
    pieces: list[Piece] = []
    model_kind, adds_space_prefix = _UNIGRAM, True
    try:
        for field, value in _fields(content):
            if field == _PIECES and isinstance(value, bytes):
                pieces.append(_piece(value))
                if len(pieces) > MAX_PIECES:
                    raise FileFormatError(f"{name}: more than {MAX_PIECES} pieces")
            elif field == _TRAINER and isinstance(value, bytes):
                model_kind = _integer(value, _TRAINER_MODEL_KIND, model_kind)
            elif field == _NORMALIZER and isinstance(value, bytes):
                adds_space_prefix = bool(_integer(value, _NORMALIZER_ADD_DUMMY_PREFIX, 1))
    except _BrokenError as error:
        raise FileFormatError(f"{name}: no SentencePiece model: {error}") from error
    if not pieces:
        raise FileFormatError(f"{name}: no SentencePiece model: it has no pieces")
    if model_kind != BPE:
        raise UnsupportedModel(
            f"{name}: of SentencePiece models only those of kind BPE can be converted, this is kind {model_kind}"
        )
    return SentencePieceModel(pieces, adds_space_prefix)


class _BrokenError(Exception):
    pass


def _piece(message: bytes) -> Piece:
    text, score, kind = b"", 0.0, 1
    for field, value in _fields(message):
        if field == _PIECE_TEXT and isinstance(value, bytes):
            text = value
        elif field == _PIECE_SCORE and isinstance(value, float):
            score = value
        elif field == _PIECE_KIND and isinstance(value, int):
            kind = value
    if not 1 <= kind <= 6 or not math.isfinite(score):
        raise _BrokenError(f"a piece of kind {kind} with the score {score}")
    return Piece(text, score, kind)


def _integer(message: bytes, wanted: int, default: int) -> int:
    found = default
    for field, value in _fields(message):
        if field == wanted and isinstance(value, int):
            found = value
    return found


def _fields(message: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Numbers and values of a message's fields; 32-bit fields as floats, 64-bit ones as bytes."""
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        wire = key & 7
        if wire == _VARINT:
            value, position = _varint(message, position)
            yield key >> 3, value
            continue
        if wire == _BYTES:
            length, position = _varint(message, position)
        elif wire in (_FIXED32, _FIXED64):
            length = 4 if wire == _FIXED32 else 8
        else:
            raise _BrokenError(f"a field of the unknown wire type {wire} at byte {position}")
        if length > len(message) - position:
            raise _BrokenError(f"a field of {length} bytes where {len(message) - position} are left")
        raw = message[position : position + length]
        position += length
        yield key >> 3, float(struct.unpack("<f", raw)[0]) if wire == _FIXED32 else raw


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = 0
    for i in range(10):
        if position + i >= len(message):
            raise _BrokenError("it ends inside a number")
        byte = message[position + i]
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return value, position + i + 1
    raise _BrokenError(f"a number of more than ten bytes at byte {position}")
