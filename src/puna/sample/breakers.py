"""Which tokens end a repetition in the eyes of DRY: those whose text holds a breaker, or begins one that others complete.

Knows vocabularies, not histories.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from threading import Lock
from weakref import WeakKeyDictionary

import numpy as np

from puna.errors import BadRequest
from puna.sample.dry import Breakers
from puna.sample.transforms import Ids
from puna.tokenizer.tokenizer import Tokenizer

MAX_BREAKERS = 64
MAX_CHARACTERS = 40  # of each that count
MAX_TAIL = 20  # tokens after the first that count
_MAX_KEPT = 8  # sets of breakers per vocabulary

_vocabularies: WeakKeyDictionary[Tokenizer, _Vocabulary] = WeakKeyDictionary()
_lock = Lock()


def breakers_of(tokenizer: Tokenizer, texts: Sequence[str]) -> Breakers:
    """Token sequences that break, by their last token.

    Errors: BadRequest when there are too many.
    """
    if len(texts) > MAX_BREAKERS:
        raise BadRequest(f"dry_sequence_breakers has {len(texts)} texts, more than {MAX_BREAKERS}")
    with _lock:
        vocabulary = _vocabularies.get(tokenizer) or _vocabularies.setdefault(tokenizer, _Vocabulary(tokenizer))
    return vocabulary.breakers(tuple(dict.fromkeys(text[:MAX_CHARACTERS] for text in texts if text)), tokenizer)


class _Vocabulary:
    """All pieces behind one another, so that they are searched with a few operations on whole arrays."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        pieces = [tokenizer.piece(token, special=True) for token in range(tokenizer.n_tokens)]
        self._ends = np.cumsum([len(piece) for piece in pieces])
        self._lengths = np.diff(self._ends, prepend=0)
        self._bytes = np.frombuffer(b"".join(pieces), np.uint8)
        self._found: dict[tuple[str, ...], Breakers] = {}

    def breakers(self, texts: tuple[str, ...], tokenizer: Tokenizer) -> Breakers:
        """Those that were asked for last are kept."""
        known = self._found.get(texts)
        if known is None:
            known = self._look_up(texts, tokenizer)
            with _lock:
                while len(self._found) >= _MAX_KEPT:
                    del self._found[next(iter(self._found))]
                self._found[texts] = known
        return known

    def _look_up(self, texts: Sequence[str], tokenizer: Tokenizer) -> Breakers:
        found: dict[int, dict[tuple[int, ...], None]] = defaultdict(dict)
        for text in texts:
            whole = self._holding(text.encode())
            for token in whole.tolist():
                found[token][token,] = None
            for n in range(1, len(text.encode())):
                tokens = np.setdiff1d(self._ending(text.encode()[:n]), whole)
                tail = _tail(text.encode()[n:], tokenizer) if len(tokens) else ()
                for token in tokens.tolist() if tail else ():
                    found[tail[-1]][token, *tail] = None
        return {last: tuple(sequences) for last, sequences in found.items()}

    def _holding(self, text: bytes) -> Ids:
        """Tokens with the text somewhere in their piece."""
        places = np.arange(len(self._bytes) - len(text) + 1)
        for offset, byte in enumerate(text):
            places = places[self._bytes[places + offset] == byte]
        tokens = np.searchsorted(self._ends, places, side="right")
        return np.unique(tokens[places + len(text) <= self._ends[tokens]])

    def _ending(self, text: bytes) -> Ids:
        """Tokens whose piece ends with the text."""
        tokens = np.flatnonzero(self._lengths >= len(text))
        for offset, byte in enumerate(reversed(text), 1):
            tokens = tokens[self._bytes[self._ends[tokens] - offset] == byte]
        return tokens


def _tail(rest: bytes, tokenizer: Tokenizer) -> tuple[int, ...]:
    """What must follow a token that has begun a breaker; nothing can where a character was cut."""
    try:
        text = rest.decode()
    except UnicodeDecodeError:
        return ()
    return tuple(tokenizer.encode(text, add_special=False, parse_special=False)[:MAX_TAIL])
