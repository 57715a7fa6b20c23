"""A vocabulary without a model file: all bytes, some words, control tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from puna.tokenizer.tokenizer import Tokenizer

WORDS = [
    b"name",
    b"age",
    b'": ',
    b'"',
    b'{"',
    b'"}',
    b"  ",
    b"\n\n",
    b" the",
    b"true",
    "é".encode(),
    "日本".encode(),
    b"</think>",
]
CONTROLS = [b"<|end|>", b"<|turn|>"]


class WordTokenizer:
    """The face of a Tokenizer that grammars look at. Encodes by the longest token, after *lead* if there is one."""

    def __init__(self, words: Sequence[bytes] = WORDS, controls: Sequence[bytes] = CONTROLS, lead: bytes = b"") -> None:
        self.pieces = [bytes([byte]) for byte in range(256)] + list(words)
        self.controls = list(controls)
        self.n_tokens = len(self.pieces) + len(self.controls)
        self.end_tokens = frozenset({len(self.pieces)} if controls else ())
        self.lead = lead
        self.n_encoded = 0

    def piece(self, token: int, *, special: bool = False) -> bytes:
        if token < len(self.pieces):
            return self.pieces[token]
        return self.controls[token - len(self.pieces)] if special else b""

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        self.n_encoded += 1
        rest, tokens = self.lead + text.encode(), []
        while rest:
            best = max((t for t, piece in enumerate(self.pieces) if rest.startswith(piece)), key=lambda t: len(self.pieces[t]))
            tokens.append(best)
            rest = rest[len(self.pieces[best]) :]
        return tokens

    @property
    def end(self) -> int:
        return len(self.pieces)

    def as_tokenizer(self) -> Tokenizer:
        return cast(Tokenizer, self)
