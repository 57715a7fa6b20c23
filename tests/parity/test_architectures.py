"""One contract for every architecture: logits of both engines on the same tiny random file, in every scenario.

Rows that differ by the order of a sum differ in the third digit, since flash attention on the CPU sums values in F16;
see tests/models/row.py for the bounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from puna.kvcache.cache import NotSupported, resume_point
from puna.native.ggml import TYPE_F16, TYPE_Q4_0, TYPE_Q8_0
from tests import scenarios
from tests.models.row import Row
from tests.models.table import ROWS
from tests.oracle import Oracle, side_by_side
from tests.puna_engine import PunaEngine
from tests.scenarios import tokens
from tests.thorough import first_of_each_name

ENERGY = 1e-3  # of the error over the reference's

CACHE_TYPES = {"cache-q8_0": TYPE_Q8_0, "cache-q4_0": TYPE_Q4_0}  # by a part of the variant's name


@dataclass
class Pair:
    puna: PunaEngine
    oracle: Oracle
    row: Row
    variant: str
    is_rounded: bool  # quantised weights or keys: activations may round to another step where a batch is cut differently

    @property
    def n_vocab(self) -> int:
        return self.puna.n_vocab

    def both(self, tokens: Any, positions: Any, sequences: Any, outputs: Any) -> None:
        """One step of both, side by side, and the comparison."""
        step = (tokens, positions, sequences, outputs)
        ours, theirs = side_by_side(lambda: self.puna.decode(*step), lambda: self.oracle.decode(*step))
        self.compare(ours, theirs)
        self.puna.cache.check_integrity()

    def compare(self, ours: npt.NDArray[np.float32], theirs: npt.NDArray[np.float32]) -> None:
        assert np.isfinite(theirs).all()
        assert ((ours - theirs) ** 2).sum() / (theirs**2).sum() <= ENERGY
        if not self.is_rounded:
            worst = np.abs(ours - theirs).max()
            assert worst / np.abs(theirs).max() <= self.row.worst
            # The same greedy choice, unless libllama holds both for equally likely within that error.
            chosen = np.take_along_axis(theirs, ours.argmax(-1, keepdims=True), -1)[:, 0]
            assert (chosen >= theirs.max(-1) - 2 * worst).all()

    def prefill(self, ids: list[int], sequence: int = 0, begin: int = 0, chunk: int = 128) -> None:
        for start in range(0, len(ids), chunk):
            part = ids[start : start + chunk]
            n = len(part)
            self.both(part, range(begin + start, begin + start + n), [sequence] * n, sorted({0, n // 2, n - 1}))

    def rewind(self, sequence: int, kept: list[int]) -> None:
        """Forget what follows these tokens."""
        n = len(kept)
        self.puna.forget(sequence, n)
        self.oracle.forget(sequence, 0 if self.row.is_recurrent else n)
        if self.row.is_recurrent and n:
            self.oracle.decode(kept, range(n), [sequence] * n, [n - 1])

    def forget(self, sequence: int = -1, begin: int = 0) -> None:
        self.puna.forget(sequence, begin)
        self.oracle.forget(sequence, begin)


CASES = first_of_each_name((name, variant) for name, row in ROWS.items() for variant in row.variants)


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1]}", scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    name, variant = request.param
    row = ROWS[name]
    folder = tmp_path_factory.mktemp("tiny")
    path = row.write(folder / "model.gguf", seed=5, **row.variants[variant])
    norm = row.norm(folder / "norm.gguf", seed=5, **row.variants[variant]) if row.norm else path
    cache_type = next((kind for name, kind in CACHE_TYPES.items() if name in variant), TYPE_F16)
    has_flash = "no-flash" not in variant
    # Two threads share the rows of every operation in one file of each architecture. In such small models they mostly wait
    # for each other, so the other files are computed by one; with another count attention sums in another order.
    is_first = variant == next(iter(row.variants))
    limits: dict[str, Any] = {
        "n_ctx": 1024,
        "n_sequences": 4,
        "cache_type": cache_type,
        "flash_attention": has_flash,
        "n_batch": 128 if "small-batches" in variant else 512,
        "n_threads": 2 if is_first else 1,
        **row.limits,
    }
    with PunaEngine(path, **limits) as puna, Oracle(norm, **limits) as oracle:
        is_rounded = cache_type != TYPE_F16 or any(t.type.is_quantized for t in puna.backend.file.tensors.values())
        yield Pair(puna, oracle, row, variant, is_rounded)


@pytest.fixture(autouse=True)
def _empty_caches(pair: Pair) -> None:
    pair.forget()


def test_prefill_every_row(pair: Pair) -> None:
    scenarios.prefill_every_row(pair)


def test_prefill_in_chunks(pair: Pair) -> None:
    ids = tokens(430, 2, pair.n_vocab)
    pair.prefill(ids[:300])
    pair.prefill(ids[300:], begin=300, chunk=50)


def test_decode_step_by_step(pair: Pair) -> None:
    scenarios.decode_step_by_step(pair)


def test_three_sequences_of_different_lengths_interleaved(pair: Pair) -> None:
    scenarios.three_sequences_of_different_lengths_interleaved(pair)


def test_remove_and_resume(pair: Pair) -> None:
    ids, other = tokens(150, 6, pair.n_vocab), tokens(40, 7, pair.n_vocab)
    pair.prefill(ids)
    point = resume_point(pair.puna.cache, 0, 128)
    pair.rewind(0, ids[:point])
    pair.prefill(ids[point:128] + other, begin=point)


@pytest.mark.parametrize("kept", [380, 150])
def test_resume_in_a_text_of_several_windows(pair: Pair, kept: int) -> None:
    """Near its end, where a window is still there, and where small batches have made the cache forget."""
    ids, other = tokens(400, 23, pair.n_vocab), tokens(40, 24, pair.n_vocab)
    pair.prefill(ids)
    point = resume_point(pair.puna.cache, 0, kept)
    pair.rewind(0, ids[:point])
    pair.prefill(ids[point:kept] + other, begin=point)


def test_copied_prefix(pair: Pair) -> None:
    ids, other = tokens(200, 8, pair.n_vocab), tokens(20, 9, pair.n_vocab)
    pair.prefill(ids[:180], 1)
    pair.puna.cache.copy_prefix(1, 2, 180)
    point = resume_point(pair.puna.cache, 2, 180)
    pair.puna.forget(2, point)
    for start, end in ((0, 128), (128, 180)):  # cut as the prefix was
        pair.oracle.decode(ids[start:end], range(start, end), [2] * (end - start), [end - start - 1])
    if point < 180:
        pair.puna.decode(ids[point:180], range(point, 180), [2] * (180 - point), [])
    pair.both(other + ids[180:], [*range(180, 200), *range(180, 200)], [2] * 20 + [1] * 20, range(40))


def test_a_shifted_context_goes_on(pair: Pair) -> None:
    puna, oracle = pair.puna, pair.oracle
    if pair.variant in pair.row.shifted_alone:
        return  # test_shifted_keys.py is the judge
    ids, more = tokens(120, 21, pair.n_vocab), tokens(20, 22, pair.n_vocab)
    pair.prefill(ids, 1)
    if not pair.row.can_shift:
        with pytest.raises(NotSupported):
            puna.cache.remove(1, 4, 60)
        pair.prefill(more, 1, begin=120)  # nothing has changed
        return
    puna.cache.remove(1, 4, 60)
    oracle.shift(1, 4, 60)
    puna.cache.check_integrity()
    pair.prefill(more, 1, begin=64)
