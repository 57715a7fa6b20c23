"""Rows of a batch given as embeddings instead of tokens: the same as the tokens that they are the embeddings of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from puna.errors import PunaError
from tests.models.table import ENCODERS, ROWS
from tests.puna_engine import PunaEngine
from tests.scenarios import tokens
from tests.tiny import write_llama

EVERY = ROWS | ENCODERS
N = 24
MIXED = [2, 3, 4, 9, 17]


def opened(name: str, folder: Any) -> PunaEngine:
    row = EVERY[name]
    variant = next(iter(row.variants.values()))
    limits: dict[str, Any] = {"n_ctx": 128, "n_sequences": 3, "n_threads": 1, **row.limits}
    return PunaEngine(row.write(folder / "model.gguf", seed=5, **variant), **limits)


@pytest.fixture(params=EVERY, scope="module")
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PunaEngine]:
    with opened(request.param, tmp_path_factory.mktemp("tiny")) as engine:
        yield engine


@pytest.mark.parametrize("rows", [range(N), MIXED], ids=["every row", "some rows"])
def test_own_embeddings_are_as_good_as_tokens(engine: PunaEngine, rows: Any) -> None:
    """Two sequences in one batch, then a step of each."""
    ids = tokens(N + 2, 3, engine.n_vocab)
    of_sequences = [0] * 14 + [1] * (N - 14)
    batch = ids[:N], [*range(14), *range(N - 14)], of_sequences, range(N)
    found = []
    for is_embedded in (False, True):
        engine.forget()
        given = (rows, engine.embeddings([ids[i] for i in rows])) if is_embedded else None
        logits = [engine.decode(*batch, embedded=given).copy()]
        if not getattr(engine.model, "sees_whole_text", False):
            one = ([1], engine.embeddings(ids[N + 1 :])) if is_embedded else None
            logits.append(engine.decode(ids[N:], [14, N - 14], [0, 1], [0, 1], embedded=one).copy())
        found.append(logits)
    for of_tokens, of_embeddings in zip(*found, strict=True):
        assert np.array_equal(of_tokens, of_embeddings)


def test_other_embeddings_are_something_else(engine: PunaEngine) -> None:
    ids = tokens(N, 4, engine.n_vocab)
    batch = ids, range(N), [0] * N, range(N)
    engine.forget()
    plain = engine.decode(*batch).copy()
    engine.forget()
    values = 2 * engine.embeddings(ids)[MIXED] + 0.5
    changed = engine.decode(*batch, embedded=(MIXED, values)).copy()
    first = 0 if getattr(engine.model, "sees_whole_text", False) else MIXED[0]
    assert not np.array_equal(changed[first:], plain[first:])
    assert np.array_equal(changed[:first], plain[:first])


@pytest.mark.parametrize(
    ("rows", "shape"),
    [([0], (1, 255)), ([0], (2, 256)), ([1, 1], (2, 256)), ([2, 1], (2, 256)), ([-1], (1, 256)), ([4], (1, 256))],
)
def test_what_fits_no_row_is_refused_and_changes_nothing(tmp_path: Any, rows: list[int], shape: tuple[int, int]) -> None:
    with PunaEngine(write_llama(tmp_path / "m.gguf"), n_ctx=64) as engine:
        batch = [5, 6, 7, 8], range(4), [0] * 4, [3]
        expected = engine.decode(*batch).copy()
        engine.forget()
        with pytest.raises(PunaError, match="embeddings"):
            engine.decode(*batch, embedded=(rows, np.zeros(shape, np.float32)))
        assert np.array_equal(engine.decode(*batch), expected)
