"""Which tokens end a repetition in the eyes of DRY: those whose text holds a breaker, or begins one that others complete.

Knows vocabularies, not histories.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from threading import Lock
from weakref import WeakKeyDictionary

from puna.errors import BadRequest
from puna.sample.dry import Breakers
from puna.tokenizer.tokenizer import Tokenizer

MAX_BREAKERS = 64
MAX_CHARACTERS = 40  # of each that count
MAX_TAIL = 20  # tokens after the first that count
_MAX_KEPT = 8  # sets of breakers per vocabulary

_found: WeakKeyDictionary[Tokenizer, dict[tuple[str, ...], Breakers]] = WeakKeyDictionary()
_lock = Lock()


def breakers_of(tokenizer: Tokenizer, texts: Sequence[str]) -> Breakers:
    """Token sequences that break, by their last token; looked up in the whole vocabulary once for the same texts.

    Errors: BadRequest when there are too many.
    """
    if len(texts) > MAX_BREAKERS:
        raise BadRequest(f"dry_sequence_breakers has {len(texts)} texts, more than {MAX_BREAKERS}")
    key = tuple(dict.fromkeys(text[:MAX_CHARACTERS] for text in texts if text))
    with _lock:
        known = _found.setdefault(tokenizer, {})
        if key not in known:
            while len(known) >= _MAX_KEPT:
                del known[next(iter(known))]
            known[key] = _look_up(tokenizer, key)
        return known[key]


def _look_up(tokenizer: Tokenizer, texts: Sequence[str]) -> Breakers:
    found: dict[int, dict[tuple[int, ...], None]] = defaultdict(dict)
    wanted = [(text.encode(), text.encode()[:1]) for text in texts]
    for token in range(tokenizer.n_tokens):
        piece = tokenizer.piece(token, special=True)
        for breaker, first in wanted:
            if first not in piece:
                continue
            for sequence in _sequences(token, piece, breaker, tokenizer):
                found[sequence[-1]][sequence] = None
    return {last: tuple(sequences) for last, sequences in found.items()}


def _sequences(token: int, piece: bytes, breaker: bytes, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    if breaker in piece:
        return [(token,)]
    sequences = []
    for length in range(1, min(len(piece), len(breaker) - 1) + 1):
        if piece.endswith(breaker[:length]):
            tail = tokenizer.encode(breaker[length:].decode("utf-8", "replace"), add_special=False, parse_special=False)
            sequences.append((token, *tail[:MAX_TAIL]))
    return sequences
