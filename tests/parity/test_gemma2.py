"""Gemma 2, where windows and full layers take turns, against libllama on the same tiny random files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from puna.errors import FileFormatError
from puna.kvcache.cache import resume_point
from tests.oracle import Oracle
from tests.puna_engine import PunaEngine
from tests.tiny import write_gemma3

# As for Gemma 3: of the error's energy over the reference's, and of the largest error over the largest logit.
ENERGY, WORST = 1e-3, 4e-3
N_BATCH = 128

VARIANTS: dict[str, dict[str, Any]] = {
    "f32": {},
    "f16-caps-that-bend": {"dtype": "f16", "logit_cap": 5.0, "metadata": {"gemma2.attn_logit_softcapping": 1.5}},
    "q8_0": {"dtype": "q8_0"},
}
Pair = tuple[PunaEngine, Oracle]


@pytest.fixture(params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    path = write_gemma3(tmp_path / "model.gguf", architecture="gemma2", n_layers=5, seed=5, **VARIANTS[request.param])
    limits: dict[str, Any] = {"n_ctx": 1024, "n_sequences": 3, "n_batch": N_BATCH}
    with PunaEngine(path, **limits) as puna, Oracle(path, **limits) as oracle:
        yield puna, oracle


def tokens(count: int, seed: int, n_vocab: int) -> list[int]:
    picked: list[int] = np.random.default_rng(seed).integers(3, n_vocab, count).tolist()
    return picked


def both(pair: Pair, *batch: Any) -> None:
    puna, oracle = pair
    ours, theirs = puna.decode(*batch), oracle.decode(*batch)
    is_rounded = any(t.type.is_quantized for t in puna.backend.file.tensors.values())
    assert ((ours - theirs) ** 2).sum() / (theirs**2).sum() <= ENERGY
    assert is_rounded or np.abs(ours - theirs).max() / np.abs(theirs).max() <= WORST
    puna.cache.check_integrity()


def prefill(pair: Pair, ids: list[int], sequence: int = 0, begin: int = 0) -> None:
    for start in range(0, len(ids), N_BATCH):
        part = ids[start : start + N_BATCH]
        n = len(part)
        both(pair, part, range(begin + start, begin + start + n), [sequence] * n, range(0, n, 9))


def test_prefill_and_decode_over_several_windows(pair: Pair) -> None:
    ids = tokens(420, 1, pair[0].n_vocab)
    prefill(pair, ids[:340])
    for p in range(340, 420):
        both(pair, ids[p : p + 1], [p], [0], [0])


def test_sequences_side_by_side_copied_resumed_and_shifted(pair: Pair) -> None:
    puna, oracle = pair
    ids, more = tokens(300, 2, puna.n_vocab), tokens(90, 3, puna.n_vocab)
    prefill(pair, ids, 0)
    prefill(pair, ids[:50], 1)
    puna.cache.copy_prefix(0, 2, 290)
    assert resume_point(puna.cache, 2, 290) == 290
    for start in range(0, 290, N_BATCH):
        part = ids[:290][start : start + N_BATCH]
        oracle.decode(part, range(start, start + len(part)), [2] * len(part), [0])
    for step in range(20):
        both(pair, more[step : step + 1] * 3, [300 + step, 50 + step, 290 + step], [0, 1, 2], [0, 1, 2])
    for engine in (puna, oracle):
        engine.forget(0, 310)
    puna.cache.remove(2, 5, 150)
    oracle.shift(2, 5, 150)
    prefill(pair, more, 0, begin=310)
    prefill(pair, more, 2, begin=165)


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"window": 0}, "a window of 0"), ({"logit_cap": -1.0}, "a cap of -1"), ({"n_heads": 3, "n_kv_heads": 2}, "cannot share")],
)
def test_metadata_that_makes_no_model(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    path = write_gemma3(tmp_path / "m.gguf", architecture="gemma2", n_layers=2, **changed)
    with pytest.raises(FileFormatError, match=message):
        PunaEngine(path)
