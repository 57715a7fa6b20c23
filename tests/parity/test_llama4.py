"""What Llama 4 does about long contexts, too far back for the contract of all architectures.

Sequences begin at a late position: both engines take what is not there as not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.models.llama4 import write_llama4
from tests.oracle import Oracle
from tests.puna_engine import PunaEngine
from tests.scenarios import tokens

CHUNK = 8192
# Of the largest error over the largest logit. Cells lie elsewhere than libllama's, and ggml sums over them in half precision.
SCALE = 2e-3


@pytest.mark.parametrize("pattern", [4, 0, [True, False, False, False, False]], ids=["pattern-4", "all-chunked", "one-chunked"])
def test_chunks_and_temperature_where_a_chunk_begins(pattern: int | Sequence[bool], tmp_path: Path) -> None:
    path = write_llama4(tmp_path / "m.gguf", seed=5, attention__sliding_window_pattern=pattern)
    with PunaEngine(path, n_ctx=1024) as puna, Oracle(path, n_ctx=1024) as oracle:
        ids = tokens(400, 1, puna.n_vocab)
        begin = 2 * CHUNK - 130
        for start, end in ((0, 100), (100, 128), (128, 129), (129, 130), (130, 131), (131, 300), (300, 301)):
            n = end - start
            batch = ids[start:end], range(begin + start, begin + end), [0] * n, range(n)
            ours, theirs = puna.decode(*batch), oracle.decode(*batch)
            assert np.abs(ours - theirs).max() <= SCALE * np.abs(theirs).max(), f"rows {start} to {end}"
            puna.cache.check_integrity()


def test_a_chunk_ends_what_a_row_sees(tmp_path: Path) -> None:
    """In chunked layers alone, the first row of a chunk is as if nothing came before it but for its position."""
    path = write_llama4(tmp_path / "m.gguf", seed=5, n_layers=3)
    with PunaEngine(path, n_ctx=1024, n_sequences=2) as puna:
        ids = tokens(60, 1, puna.n_vocab)
        seen = puna.decode(ids, range(CHUNK - 40, CHUNK + 20), [0] * 60, range(60))[40:].copy()
        alone = puna.decode(ids[40:], range(CHUNK, CHUNK + 20), [1] * 20, range(20))
        assert np.abs(seen - alone).max() <= SCALE * np.abs(alone).max()


def test_more_keys_move_than_before_in_layers_without_positions(tmp_path: Path) -> None:
    """They turn by nothing, and what says how far is then an input that no operation has, and larger the second time."""
    path = write_llama4(tmp_path / "m.gguf", seed=5)
    with PunaEngine(path, n_ctx=1024) as puna:
        for n in (40, 200, 600):
            puna.forget(0)
            ids = tokens(n, 1, puna.n_vocab)
            puna.decode(ids, range(n), [0] * n, [n - 1])
            puna.cache.remove(0, 4, 20)
            puna.cache.check_integrity()
            assert puna.cache.length(0) == n - 16
            assert np.isfinite(puna.decode([7], [n - 16], [0], [0])).all()
