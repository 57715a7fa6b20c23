"""What only recurrent states can get wrong: unequal steps, states of other sequences, resuming, undone steps.

libllama on the same file is the judge, and computes from the beginning what the engine resumes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from puna.kvcache.batch import batch
from puna.kvcache.cache import resume_point
from tests.models.table import ROWS
from tests.oracle import Oracle
from tests.parity.test_architectures import Pair
from tests.puna_engine import PunaEngine
from tests.scenarios import tokens

RECURRENT = [name for name, row in ROWS.items() if row.is_recurrent and row.norm is None]
N_SEQUENCES = 6


@pytest.fixture(params=RECURRENT, scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    row = ROWS[request.param]
    variant = next(iter(row.variants))
    path = row.write(tmp_path_factory.mktemp("tiny") / "model.gguf", seed=11, **row.variants[variant])
    with (
        PunaEngine(path, n_ctx=512, n_sequences=N_SEQUENCES) as puna,
        Oracle(path, n_ctx=512, n_sequences=N_SEQUENCES) as oracle,
    ):
        yield Pair(puna, oracle, row, variant, is_rounded=False)


@pytest.fixture(autouse=True)
def _empty_caches(pair: Pair) -> None:
    pair.forget()


def decode(pair: Pair, ids: list[int], begin: int, end: int, sequence: int = 0) -> None:
    """One token per step, the engine alone."""
    for p in range(begin, end):
        pair.puna.decode(ids[p : p + 1], [p], [sequence], [0])


def recompute(pair: Pair, ids: list[int], sequence: int) -> None:
    pair.oracle.forget(sequence, 0)
    pair.oracle.decode(ids, range(len(ids)), [sequence] * len(ids), [len(ids) - 1])


def test_many_sequences_with_unequal_counts_in_every_step(pair: Pair) -> None:
    random = np.random.default_rng(1)
    ids = [tokens(400, 30 + s, pair.n_vocab) for s in range(N_SEQUENCES)]
    lengths = [0] * N_SEQUENCES
    for _ in range(10):
        # Some sequences sit a step out, some have one token, some fewer than a convolution sees, some many.
        counts = random.choice([0, 1, 1, 2, 3, 17, 17, 40], N_SEQUENCES)
        rows = [(s, lengths[s] + i) for s, count in enumerate(counts) for i in range(count)]
        if rows:
            pair.both([ids[s][p] for s, p in rows], [p for _, p in rows], [s for s, _ in rows], range(len(rows)))
        lengths = [n + int(count) for n, count in zip(lengths, counts, strict=True)]
    assert len(set(lengths)) > 2


def test_the_sequences_of_a_step_may_come_in_any_order(pair: Pair) -> None:
    ids = tokens(60, 40, pair.n_vocab)
    pair.both(ids[:30], [*range(10), *range(10), *range(10)], [4] * 10 + [1] * 10 + [3] * 10, range(30))
    order = [3, 1, 4]
    pair.both(ids[30:33], [10] * 3, order, range(3))
    pair.both(ids[33:39], [11, 12] * 3, [1, 1, 4, 4, 3, 3], range(6))


def test_resuming_at_the_end_of_a_prompt(pair: Pair) -> None:
    ids, other = tokens(120, 41, pair.n_vocab), tokens(30, 42, pair.n_vocab)
    pair.puna.decode(ids[:50], range(50), [0] * 50, [49])
    pair.puna.decode(ids[50:90], range(50, 90), [0] * 40, [39])
    decode(pair, ids, 90, 110)
    assert resume_point(pair.puna.cache, 0, 100) == 90
    pair.puna.forget(0, 90)
    recompute(pair, ids[:90], 0)
    pair.prefill(other, begin=90)


def test_a_prefix_copied_at_a_checkpoint_grows_beside_its_source(pair: Pair) -> None:
    ids, other = tokens(140, 43, pair.n_vocab), tokens(20, 44, pair.n_vocab)
    pair.puna.decode(ids[:90], range(90), [1] * 90, [89])
    decode(pair, ids, 90, 105, sequence=1)
    pair.puna.cache.copy_prefix(1, 4, 100)
    assert resume_point(pair.puna.cache, 4, 100) == 90
    recompute(pair, ids[:105], 1)
    recompute(pair, ids[:90], 4)
    for i in range(3):
        pair.both([ids[105 + i], other[i]], [105 + i, 90 + i], [1, 4], [0, 1])
    pair.forget(1)
    pair.both(other[3:], range(93, 110), [4] * 17, range(17))


def test_a_new_sequence_in_an_old_place_knows_nothing_of_the_old_one(pair: Pair) -> None:
    ids = tokens(80, 45, pair.n_vocab)
    for sequence in range(N_SEQUENCES):
        pair.puna.decode(ids, range(80), [sequence] * 80, [79])
    pair.forget()
    pair.both(ids[:1] + ids[7:40], [0, *range(33)], [2] + [3] * 33, range(34))


def test_an_aborted_step_is_undone(pair: Pair) -> None:
    puna = pair.puna
    ids = [tokens(100, 46 + s, pair.n_vocab) for s in range(2)]
    for s in range(2):
        pair.prefill(ids[s][:60], s)
    puna.backend.abort()
    step = batch(ids[0][60:90] + ids[1][60:61], [*range(60, 90), 60], [0] * 30 + [1], [30])
    assert puna.forward(step) is None
    puna.backend.clear_abort()
    for s in range(2):
        assert resume_point(puna.cache, s, 60) == 60
        puna.forget(s, 60)
    pair.both(ids[0][60:62] + ids[1][60:63], [60, 61, 60, 61, 62], [0] * 2 + [1] * 3, range(5))
