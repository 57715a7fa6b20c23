"""What every engine is asked for, whatever runs it: steps in all the arrangements that serving makes of them."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np


class Pair(Protocol):
    """An engine and libllama driven by hand, over the same file and with the same history."""

    @property
    def n_vocab(self) -> int: ...

    def both(self, tokens: Any, positions: Any, sequences: Any, outputs: Any) -> None:
        """One step of both, and the comparison."""

    def prefill(self, ids: list[int], sequence: int = 0, begin: int = 0) -> None:
        """A text, or more of it, of which some rows are compared."""


def tokens(count: int, seed: int, n_vocab: int) -> list[int]:
    """Drawn at random, but no control tokens."""
    picked: list[int] = np.random.default_rng(seed).integers(3, n_vocab, count).tolist()
    return picked


def prefill_every_row(pair: Pair) -> None:
    pair.both(tokens(60, 1, pair.n_vocab), range(60), [0] * 60, range(60))


def decode_step_by_step(pair: Pair) -> None:
    ids = tokens(290, 3, pair.n_vocab)
    pair.prefill(ids[:245])
    for p in range(245, 290):
        pair.both(ids[p : p + 1], [p], [0], [0])


def three_sequences_of_different_lengths_interleaved(pair: Pair) -> None:
    lengths = [5, 200, 90]
    ids = [tokens(n + 60, 10 + n, pair.n_vocab) for n in lengths]
    for s, n in enumerate(lengths):
        pair.prefill(ids[s][:n], s)
    for step in range(12):
        now = [text[n + step] for text, n in zip(ids, lengths, strict=True)]
        pair.both(now, [n + step for n in lengths], [0, 1, 2], [0, 1, 2])
    rows = [(s, n + 12 + i) for s, (n, count) in enumerate(zip(lengths, (40, 1, 25), strict=True)) for i in range(count)]
    pair.both([ids[s][p] for s, p in rows], [p for _, p in rows], [s for s, _ in rows], range(len(rows)))
