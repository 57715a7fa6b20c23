"""The compatibility engine keeps what Puna's own promises: logits of every scenario against libllama driven by hand.

The models: keys and values of all tokens, of a window, learned positions, a recurrent state, and both in one model; and
those of all rows of the table of architectures, which Puna's engine computes as well.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from puna.errors import PunaError
from puna.gguf.reader import GGUFFile
from puna.kvcache.batch import batch
from puna.kvcache.cache import NotSupported, resume_point
from puna.kvcache.cells import CacheFull
from puna.native.ggml import TYPE_F16, TYPE_Q8_0
from tests import scenarios
from tests.compat_engine import CompatEngine
from tests.models.table import ROWS
from tests.oracle import Oracle
from tests.scenarios import tokens
from tests.thorough import first
from tests.tiny import write_bert, write_gemma3, write_llama
from tests.tiny_others import write_gpt2, write_jamba, write_mamba, write_stablelm, write_t5encoder

# Of the error's energy over the reference's, and of the largest error over the largest logit: both run the same code, but
# over another arrangement of cells, and flash attention on the CPU sums values in F16.
ENERGY, WORST = 1e-3, 1e-2
# Where a near tie between two experts falls the other way, one row of many is off; the energy shows it if more are.
WORST_OF_EXPERTS = 5e-2

N_CTX, N_SEQUENCES = 1024, 4


@dataclass(frozen=True)
class Kind:
    write: Callable[..., Path]
    cache_type: int = TYPE_F16
    can_shift: bool = True
    resumes_anywhere: bool = True
    worst: float = WORST
    fields: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 5  # with others a router's near tie between two experts may fall either way, by the order of a sum


KINDS = {
    "llama": Kind(write_llama),
    "llama-cache-q8_0": Kind(write_llama, TYPE_Q8_0),
    "gemma3": Kind(write_gemma3),
    "stablelm": Kind(write_stablelm),
    "gpt2": Kind(write_gpt2),
    "mamba": Kind(write_mamba, can_shift=False, resumes_anywhere=False),
    "jamba": Kind(write_jamba, can_shift=False, resumes_anywhere=False),
}

# Of these tiny files the numbers are chaotic: what differs in the last digit, by the order of a sum, differs in the first
# one after some layers. The last test here shows it.
LEFT_OUT = ("gemma3n",)

# The plain variant of each; other programs' names of keys and tensors are not for libllama.
TABLE = {
    f"row-{name}": Kind(
        row.write,
        can_shift=row.can_shift and not row.is_recurrent,
        resumes_anywhere=not row.is_recurrent,
        worst=WORST_OF_EXPERTS,
        fields=next(iter(row.variants.values())),
        seed=6 if name == "deepseek2" else 5,
    )
    for name, row in ROWS.items()
    if row.norm is None and name not in LEFT_OUT
}


# One of each way in which libllama remembers what it has seen; Puna's part is the same for all.
_OF_EACH_MEMORY = (
    "deepseek2",
    "falcon-h1",
    "gemma2",
    "gpt-oss",
    "lfm2",
    "llama4",
    "mamba2",
    "nemotron_h_moe",
    "qwen2vl",
    "qwen3next",
)
IN_MAKE_TEST = [*KINDS, *(f"row-{name}" for name in _OF_EACH_MEMORY)]
NAMES = first(len(IN_MAKE_TEST), dict.fromkeys([*IN_MAKE_TEST, *TABLE]))


@dataclass
class Pair:
    compat: CompatEngine
    oracle: Oracle
    kind: Kind

    @property
    def n_vocab(self) -> int:
        return self.compat.n_vocab

    def both(self, tokens: Any, positions: Any, sequences: Any, outputs: Any) -> None:
        ours = self.compat.decode(tokens, positions, sequences, outputs)
        assert_close(ours, self.oracle.decode(tokens, positions, sequences, outputs), self.kind.worst)

    def prefill(self, ids: list[int], sequence: int = 0, begin: int = 0) -> None:
        n = len(ids)
        self.both(ids, range(begin, begin + n), [sequence] * n, sorted({0, n // 2, n - 1}))


def assert_close(ours: npt.NDArray[np.float32], theirs: npt.NDArray[np.float32], worst: float = WORST) -> None:
    assert np.isfinite(theirs).all()
    assert ((ours - theirs) ** 2).sum() / (theirs**2).sum() <= ENERGY
    assert np.abs(ours - theirs).max() / np.abs(theirs).max() <= worst


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("compat")
    return {name: kind.write(folder / f"{name}.gguf", seed=11) for name, kind in KINDS.items()}


@pytest.fixture(params=NAMES, scope="module")
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    kind = (KINDS | TABLE)[request.param]
    path = kind.write(tmp_path_factory.mktemp("loaded") / "model.gguf", seed=kind.seed, **kind.fields)
    limits: dict[str, Any] = {"n_ctx": N_CTX, "n_sequences": N_SEQUENCES, "cache_type": kind.cache_type}
    with CompatEngine(path, **limits) as compat, Oracle(path, **limits) as oracle:
        yield Pair(compat, oracle, kind)


@pytest.fixture
def pair(loaded: Pair) -> Pair:
    loaded.compat.forget()
    for sequence in range(N_SEQUENCES):
        loaded.oracle.forget(sequence)
    return loaded


def test_prefill_every_row(pair: Pair) -> None:
    scenarios.prefill_every_row(pair)


def test_prefill_in_chunks(pair: Pair) -> None:
    ids = tokens(400, 2, pair.n_vocab)
    pair.prefill(ids[:250])
    pair.prefill(ids[250:], begin=250)


def test_decode_step_by_step(pair: Pair) -> None:
    scenarios.decode_step_by_step(pair)


def test_greedy_text_is_the_same(pair: Pair) -> None:
    prompt = tokens(30, 4, pair.n_vocab)
    assert pair.compat.greedy(prompt, 60) == pair.oracle.greedy(prompt, 60)


def test_three_sequences_of_different_lengths_interleaved(pair: Pair) -> None:
    scenarios.three_sequences_of_different_lengths_interleaved(pair)


def test_remove_and_resume(pair: Pair) -> None:
    cache = pair.compat.cache
    ids, other = tokens(150, 6, pair.n_vocab), tokens(40, 7, pair.n_vocab)
    pair.prefill(ids)
    assert resume_point(cache, 0, 150) == 150
    point = resume_point(cache, 0, 128)
    assert point == (128 if pair.kind.resumes_anywhere else 0)
    pair.compat.forget(0, 128)
    assert cache.length(0) == point
    pair.oracle.forget(0, point or -1)
    pair.prefill(ids[point:128] + other, begin=point)


def test_a_copied_prefix_takes_no_room(pair: Pair) -> None:
    cache = pair.compat.cache
    ids, other = tokens(200, 8, pair.n_vocab), tokens(20, 9, pair.n_vocab)
    pair.prefill(ids[:180], 1)
    n_free = cache.n_free
    cache.copy_prefix(1, 2, 180)
    assert (cache.length(2), cache.n_free) == (180, n_free)
    pair.oracle.decode(ids[:180], range(180), [2] * 180, [179])
    pair.both(ids[180:] + other, [*range(180, 200), *range(180, 200)], [1] * 20 + [2] * 20, range(40))
    pair.compat.forget(1)  # the other still has what both shared
    pair.both(other, range(200, 220), [2] * 20, range(20))


def test_part_of_a_prefix_is_copied_where_that_is_possible(pair: Pair) -> None:
    cache = pair.compat.cache
    ids, other = tokens(100, 8, pair.n_vocab), tokens(20, 9, pair.n_vocab)
    pair.prefill(ids, 1)
    cache.copy_prefix(1, 2, 70)
    point = cache.length(2)
    assert point == (70 if pair.kind.resumes_anywhere else 0)
    if point:
        pair.oracle.decode(ids[:70], range(70), [2] * 70, [69])
    pair.prefill(other, 2, begin=point)


def test_a_shifted_context_goes_on(pair: Pair) -> None:
    cache = pair.compat.cache
    ids, more = tokens(60, 21, pair.n_vocab), tokens(20, 22, pair.n_vocab)
    pair.prefill(ids, 1)
    pair.prefill(more, 2)
    if not pair.kind.can_shift or pair.compat.model.has_axes:
        with pytest.raises(NotSupported):
            cache.remove(1, 4, 30)
        pair.prefill(more, 1, begin=60)  # nothing has changed
        return
    cache.remove(1, 4, 30)
    pair.oracle.shift(1, 4, 30)
    assert cache.length(1) == 34
    pair.prefill(more, 1, begin=34)
    pair.prefill(more, 2, begin=20)  # a neighbour in the same pool did not move


def test_shared_cells_are_not_moved(pair: Pair) -> None:
    """They would move for the other sequence too."""
    cache = pair.compat.cache
    ids, more = tokens(60, 23, pair.n_vocab), tokens(20, 24, pair.n_vocab)
    pair.prefill(ids, 1)
    cache.copy_prefix(1, 2, 60)
    with pytest.raises(NotSupported):
        cache.remove(2, 4, 30)
    pair.prefill(more, 1, begin=60)
    pair.compat.forget(2)


def test_tokens_are_counted_and_a_full_pool_is_refused(files: dict[str, Path]) -> None:
    with CompatEngine(files["stablelm"], n_ctx=512, n_sequences=2, n_pool=512) as compat:
        cache, ids = compat.cache, tokens(256, 30, compat.n_vocab)
        assert cache.n_free == 512
        compat.decode(ids, range(256), [0] * 256, [255])
        compat.decode(ids[:200], range(200), [1] * 200, [199])
        assert cache.n_free == 56
        before = compat.decode(ids[200:201], [200], [1], [0])
        with pytest.raises(CacheFull):
            compat.decode(ids[:56], range(201, 257), [1] * 56, [55])
        assert (cache.n_free, cache.length(1)) == (55, 201)
        compat.forget(0)
        assert cache.n_free == 512 - 201
        compat.forget(1, 200)
        assert_close(compat.decode(ids[200:201], [200], [1], [0]), before)


def test_what_a_window_forgot_is_not_resumed(files: dict[str, Path]) -> None:
    """With a window of 64 and a pool that others need, a sequence keeps its end."""
    with CompatEngine(files["gemma3"], n_ctx=512, n_sequences=3, n_pool=768) as compat, Oracle(files["gemma3"]) as oracle:
        cache, ids = compat.cache, tokens(512, 31, compat.n_vocab)
        compat.decode(ids[:400], range(400), [0] * 400, [399])
        for _ in range(3):
            compat.decode(ids[:300], range(300), [1] * 300, [299])
            compat.forget(1)
        points = [p for p in range(401) if resume_point(cache, 0, p) == p]
        assert points[-1] == 400
        for point in (points[-1], points[len(points) // 2]):
            compat.forget(0, point)
            oracle.forget(0)
            oracle.decode(ids[:point], range(point), [0] * point, [])
            rest = ids[point : point + 20]
            ours, theirs = (e.decode(rest, range(point, point + 20), [0] * 20, range(20)) for e in (compat, oracle))
            assert_close(ours, theirs)


BAD_BATCHES: dict[str, tuple[list[int], list[int], list[int], list[int], str]] = {
    "nothing": ([], [], [], [], "a batch of 0 tokens"),
    "no row wanted": ([5], [0], [3], [], "0 rows"),
    "a token beyond the vocabulary": ([10**6], [0], [3], [0], "token"),
    "a token below zero": ([-1], [0], [3], [0], "token"),
    "a sequence too many": ([5], [0], [4], [0], "sequence"),
    "a position beyond the context": ([5], [N_CTX], [3], [0], "position"),
    "a gap": ([5], [1], [3], [0], "goes on at 0, not at 1"),
    "an overlap": ([5], [29], [0], [0], "goes on at 30, not at 29"),
    "positions that jump": ([5, 6], [0, 2], [3, 3], [1], "goes on at 0"),
    "a sequence in pieces": ([5, 6, 7], [30, 0, 31], [0, 3, 0], [2], "stand together"),
    "a row that is not there": ([5], [0], [3], [1], "row"),
    "rows out of order": ([5, 6], [0, 1], [3, 3], [1, 0], "not in order"),
    "too many tokens": ([5] * 513, [*range(513)], [3] * 513, [0], "from 1 to 512"),
}


@pytest.mark.parametrize("loaded", KINDS, indirect=True)
@pytest.mark.parametrize("what", BAD_BATCHES)
def test_a_batch_that_libllama_would_abort_on_does_not_reach_it(pair: Pair, what: str) -> None:
    ids = tokens(40, 40, pair.n_vocab)
    pair.prefill(ids[:30])
    ids_of, positions, sequences, outputs, message = BAD_BATCHES[what]
    with pytest.raises(PunaError, match=message):
        pair.compat.decode(ids_of, positions, sequences, outputs)
    pair.prefill(ids[30:], begin=30)


def test_rows_given_as_embeddings_are_as_good_as_tokens(files: dict[str, Path]) -> None:
    """Some of two sequences, tokens before, between and after them."""
    with GGUFFile.open(files["llama"]) as file:
        table = np.frombuffer(file.tensor_data("token_embd.weight"), np.float32).reshape(-1, 256).copy()
    with CompatEngine(files["llama"], n_ctx=256, n_sequences=2) as compat:
        ids = tokens(20, 12, compat.n_vocab)
        step = ids, [*range(12), *range(8)], [0] * 12 + [1] * 8, range(20)
        expected = compat.decode(*step).copy()
        compat.forget()
        rows = [0, 3, 4, 9, 13, 19]
        assert_close(compat.decode(*step, embedded=(rows, table[[ids[row] for row in rows]])), expected)
        assert (compat.cache.length(0), compat.cache.length(1)) == (12, 8)


def test_more_rows_than_memory_was_taken_for_are_refused(files: dict[str, Path]) -> None:
    with CompatEngine(files["llama"], n_ctx=256, n_sequences=2, max_rows=2) as compat:
        ids = tokens(10, 41, compat.n_vocab)
        with pytest.raises(PunaError, match="3 rows"):
            compat.decode(ids, range(10), [0] * 10, [1, 2, 3])
        assert compat.decode(ids, range(10), [0] * 10, [1, 3]).shape == (2, compat.n_vocab)


class Requests:
    """Random requests to four sequences, and what each must hold by now. A fifth is there to compute afresh in."""

    AFRESH = 4

    def __init__(self, compat: CompatEngine, chance: random.Random) -> None:
        self.compat, self.cache, self.chance = compat, compat.cache, chance
        self.held: list[list[int]] = [[] for _ in range(4)]
        self.has_shifted = [False] * 4
        self.n_compared = 0

    def go_on(self, s: int) -> None:
        new = [self.chance.randrange(3, self.compat.n_vocab) for _ in range(self.chance.randint(1, 60))]
        length = len(self.held[s])
        if length < 190 and len(new) <= self.cache.n_free:
            self.compat.decode(new, range(length, length + len(new)), [s] * len(new), [len(new) - 1])
            self.held[s] = self.held[s] + new

    def fork(self, s: int) -> None:
        target = self.chance.choice([i for i in range(4) if i != s])
        length = resume_point(self.cache, s, self.chance.randint(0, len(self.held[s])))
        self.cache.copy_prefix(s, target, length)
        self.held[target], self.has_shifted[target] = self.held[s][:length], self.has_shifted[s]

    def cut(self, s: int) -> None:
        length = resume_point(self.cache, s, self.chance.randint(0, len(self.held[s])))
        self.cache.remove(s, length)
        self.held[s] = self.held[s][:length]

    def shift(self, s: int) -> None:
        begin = self.chance.randint(1, 8)
        end = begin + self.chance.randint(1, 10)
        if end < len(self.held[s]):
            with contextlib.suppress(NotSupported):
                self.cache.remove(s, begin, end)
                self.held[s] = self.held[s][:begin] + self.held[s][end:]
                self.has_shifted[s] = True

    def drop(self, s: int) -> None:
        self.cache.remove(s, 0)
        self.held[s], self.has_shifted[s] = [], False

    def compare(self, s: int) -> None:
        """The next token's logits; keys that were moved are not those of tokens that always stood there."""
        ids = [*self.held[s], 7]
        if self.has_shifted[s] or self.cache.n_free < len(ids) + 1:
            return
        (ours,) = self.compat.decode(ids[-1:], [len(ids) - 1], [s], [0])
        self.held[s] = ids
        for begin in range(0, len(ids), 64):
            part = ids[begin : begin + 64]
            rows = range(begin, begin + len(part)), [self.AFRESH] * len(part), [len(part) - 1]
            (theirs,) = self.compat.decode(part, *rows)
        self.cache.remove(self.AFRESH, 0)
        assert_close(ours, theirs)
        self.n_compared += 1


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "mamba", "jamba"])
def test_whatever_happens_to_the_sequences_the_next_token_follows_from_what_they_hold(files: dict[str, Path], name: str) -> None:
    chance = random.Random(7)
    with CompatEngine(files[name], n_ctx=256, n_sequences=5, n_pool=768, n_batch=64) as compat:
        requests = Requests(compat, chance)
        actions = [*[requests.go_on] * 4, requests.fork, requests.cut, requests.shift, requests.drop, *[requests.compare] * 2]
        for step in range(200):
            chance.choice(actions)(chance.randrange(4))
            assert [requests.cache.length(i) for i in range(4)] == [len(ids) for ids in requests.held], step
            requests.cache.check_integrity()
        assert requests.n_compared > 15


@pytest.mark.parametrize("name", ["bert", "t5encoder"])
def test_texts_that_are_seen_as_a_whole_are_pooled_by_libllama(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = {"bert": write_bert, "t5encoder": write_t5encoder}[name]
    path = write(tmp_path / "model.gguf", pooling=1)
    with (
        CompatEngine(path, n_ctx=128, n_sequences=4, pooling=1) as compat,
        Oracle(path, n_ctx=128, n_sequences=4, embeddings=True) as oracle,
    ):
        # libllama makes a memory for T5's encoder, which its encoder does not use.
        monkeypatch.setattr(oracle, "lib", SimpleNamespace(**{**vars(oracle.lib), "llama_get_memory": lambda _: 0}))
        texts = [tokens(n, 70 + n, compat.n_vocab) for n in (30, 5, 41)]
        begins = [0, 30, 35]
        flat = [token for text in texts for token in text]
        positions = [p for text in texts for p in range(len(text))]
        ours = compat.decode(flat, positions, [s for s, text in enumerate(texts) for _ in text], begins)
        theirs = oracle.embed(texts)
    assert ours.shape == theirs.shape == (3, 128)
    assert_close(ours, theirs)


def test_the_number_of_threads_may_change_between_steps(files: dict[str, Path]) -> None:
    with CompatEngine(files["llama"], n_ctx=256, n_sequences=2) as compat:
        ids = tokens(50, 60, compat.n_vocab)
        rows = []
        for sequence, n_threads in enumerate((1, 2)):
            compat.model.set_threads(n_threads)
            rows.append(compat.decode(ids, range(50), [sequence] * 50, range(50)))
        assert_close(rows[0], rows[1])


class Aborting:
    """Breaks off the compute as soon as libllama has begun it."""

    def __init__(self, compat: CompatEngine) -> None:
        self.compat = compat

    def decode(self, ids: list[int], begin: int, sequence: int) -> npt.NDArray[np.float32] | None:
        self.compat.model.abort()
        try:
            n = len(ids)
            return self.compat.model.forward(batch(ids, range(begin, begin + n), [sequence] * n, [n - 1]))
        finally:
            self.compat.model.clear_abort()


def test_an_aborted_step_leaves_everything_as_it_was(files: dict[str, Path]) -> None:
    with CompatEngine(files["llama"], n_ctx=512, n_sequences=2) as compat:
        cache, ids = compat.cache, tokens(300, 50, compat.n_vocab)
        compat.decode(ids[:100], range(100), [0] * 100, [99])
        compat.decode(ids[:50], range(50), [1] * 50, [49])
        assert Aborting(compat).decode(ids[100:300], 100, 0) is None
        cache.check_integrity()
        compat.forget(0, 100)
        ours = compat.decode(ids[100:], range(100, 300), [0] * 200, [199])
        compat.forget(1)
        assert_close(ours, compat.decode(ids, range(300), [1] * 300, [299]))


def test_turning_keys_is_not_broken_off(files: dict[str, Path]) -> None:
    """Keys of some layers would be turned twice by the next step."""
    with CompatEngine(files["llama"], n_ctx=512, n_sequences=2) as compat:
        ids, more = tokens(100, 51, compat.n_vocab), tokens(10, 52, compat.n_vocab)
        for sequence in (0, 1):
            compat.decode(ids, range(100), [sequence] * 100, [99])
            compat.cache.remove(sequence, 10, 50)
            if sequence == 0:
                assert Aborting(compat).decode(more, 60, 0) is not None
            else:
                ours = compat.decode(more, range(60, 70), [1] * 10, [9])
        compat.forget(0, 60)
        assert_close(compat.decode(more, range(60, 70), [0] * 10, [9]), ours)


@pytest.mark.parametrize("name", ["mamba", "jamba"])
def test_a_recurrent_model_finishes_its_steps(files: dict[str, Path], name: str) -> None:
    """A step may move the states of sequences that are not in it: half of that would lose them."""
    with CompatEngine(files[name], n_ctx=512, n_sequences=3) as compat:
        ids = tokens(100, 53, compat.n_vocab)
        for sequence in range(3):
            compat.decode(ids[: 10 + sequence], range(10 + sequence), [sequence] * (10 + sequence), [9])
        assert Aborting(compat).decode(ids[12:], 12, 2) is not None
        compat.cache.check_integrity()


@pytest.mark.parametrize("name", LEFT_OUT)
def test_rows_are_left_out_only_where_libllama_disagrees_with_itself(tmp_path: Path, name: str) -> None:
    path = ROWS[name].write(tmp_path / "model.gguf", seed=5, **next(iter(ROWS[name].variants.values())))
    with Oracle(path, n_ctx=N_CTX) as oracle:
        ids = tokens(200, 54, oracle.n_vocab)
        whole = oracle.decode(ids, range(200), [0] * 200, range(200))
        oracle.forget(0)
        pieces = [oracle.decode(ids[i : i + 40], range(i, i + 40), [0] * 40, range(40)) for i in range(0, 200, 40)]
    assert ((np.concatenate(pieces) - whole) ** 2).sum() / (whole**2).sum() > 10 * ENERGY
