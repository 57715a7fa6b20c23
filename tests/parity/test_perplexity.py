"""A real model's perplexity on real text, against libllama's."""

from __future__ import annotations

import math
from pydoc_data.topics import topics

import numpy as np
import pytest

from puna.store.store import Store
from puna.tokenizer.tokenizer import Tokenizer
from tests.oracle import Oracle, side_by_side
from tests.puna_engine import PunaEngine

N_TOKENS, CHUNK = 4096, 512
SCORED = range(CHUNK // 2, CHUNK - 1)  # rows with at least half a chunk before them, as llama.cpp measures it


def text_tokens(tokenizer: Tokenizer) -> list[int]:
    """The language reference that comes with Python; which version of it does not matter to the comparison."""
    text = "\n\n".join(topics[name] for name in ("types", "import"))
    ids = tokenizer.encode(text)[:N_TOKENS]
    assert len(ids) == N_TOKENS
    return ids


def losses(engine: PunaEngine | Oracle, ids: list[int]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Negative log-likelihoods of the tokens that follow the scored rows."""
    found = []
    for begin in range(0, len(ids), CHUNK):
        engine.forget()
        chunk = ids[begin : begin + CHUNK]
        rows = engine.decode(chunk, range(CHUNK), [0] * CHUNK, SCORED).astype(np.float64)
        highest = rows.max(-1)
        normaliser = highest + np.log(np.exp(rows - highest[:, None]).sum(-1))
        found.append(normaliser - rows[np.arange(len(SCORED)), [chunk[row + 1] for row in SCORED]])
    return np.concatenate(found)


@pytest.mark.thorough
def test_perplexity_is_libllama_s_to_three_digits(starter_store: Store) -> None:
    path = starter_store.get("smollm2:135m").model_path
    tokenizer = Tokenizer(path)
    ids = text_tokens(tokenizer)
    tokenizer.close()
    with PunaEngine(path, n_ctx=CHUNK) as puna, Oracle(path, n_ctx=CHUNK) as oracle:
        ours, theirs = side_by_side(lambda: losses(puna, ids), lambda: losses(oracle, ids))
    perplexity, expected = math.exp(ours.mean()), math.exp(theirs.mean())
    assert 2 < expected < 40  # it reads the text, it does not guess
    assert abs(perplexity / expected - 1) < 5e-4, (perplexity, expected)
    assert np.abs(ours - theirs).mean() < 0.02  # token by token, so that errors of both signs do not cancel out
