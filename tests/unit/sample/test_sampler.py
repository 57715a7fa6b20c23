from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from puna.sample import transforms
from puna.sample.choice import sample_batch
from puna.sample.sampler import SampleError, Sampler
from puna.wire import SamplingOptions

N_VOCAB = 30000  # more than NARROW, with enough blocks for the fast top-k


def sampler(**options: Any) -> Sampler:
    return Sampler(SamplingOptions(**options))


def logits(*rows: list[float]) -> NDArray[np.float32]:
    return np.array(rows, np.float32)


def random_logits(n_rows: int, seed: int = 0, n_vocab: int = N_VOCAB) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal((n_rows, n_vocab)) * 3).astype(np.float32)


def token(result: list[int | SampleError]) -> int:
    assert len(result) == 1
    assert isinstance(result[0], int)
    return result[0]


@pytest.mark.parametrize(
    ("row", "expected"),
    [([-10, 3, -10, -10], 1), ([-100, -10, 0, 10], 3), ([2, 5, 5, 1], 1), ([math.nan, 1, math.nan, 2], 3), ([-math.inf, -3], 1)],
)
@pytest.mark.parametrize("greedy", [{"temperature": 0}, {"temperature": -1}, {"top_k": 1}])
def test_greedy_takes_the_first_of_the_greatest(row: list[float], expected: int, greedy: dict[str, Any]) -> None:
    assert token(sample_batch(logits(row), [sampler(**greedy)])) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 1e-10},
        {"top_p": 0},
        {"top_p": -3},
        {"min_p": 1},
        {"min_p": 7},
        {"temperature": 1e-30},
        {"typical_p": 0, "top_k": 2},
    ],
)
@pytest.mark.parametrize("top_k", [0, 3])
def test_options_that_leave_one_token(options: dict[str, Any], top_k: int) -> None:
    row = logits([9, 0, -10, 8, 1])
    for seed in range(20):
        assert token(sample_batch(row, [sampler(**{"temperature": 1.0, "top_k": top_k, "seed": seed} | options)])) == 0


option_rows = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-8, 0.8, 1.0, 3.0, 50.0]),
        "top_k": st.sampled_from([-1, 0, 1, 2, 40, 900, 2000, 10**6]),
        "top_p": st.sampled_from([0.0, 0.5, 0.9, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 0.05, 1.0]),
        "typical_p": st.sampled_from([1.0, 1.0, 0.7]),
        "repeat_last_n": st.sampled_from([-1, 0, 3]),
        "repeat_penalty": st.sampled_from([0.0, 1.0, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 1.0]),
        "frequency_penalty": st.sampled_from([0.0, -0.5]),
        "seed": st.integers(-(2**63), 2**63 - 1).filter(lambda seed: seed != -1),
    }
)


@settings(max_examples=40)
@given(st.lists(option_rows, min_size=1, max_size=6), st.integers(0, 1000))
def test_a_batch_gives_each_row_what_it_gets_alone(rows: list[dict[str, Any]], seed: int) -> None:
    together = [sampler(**options) for options in rows]
    alone = [sampler(**options) for options in rows]
    for step in range(3):
        data = random_logits(len(rows), seed + step, n_vocab=12000)
        before = data.copy()
        batch = sample_batch(data, together)
        single = [token(sample_batch(data[i : i + 1], [s])) for i, s in enumerate(alone)]
        assert batch == single
        np.testing.assert_array_equal(data, before)
        for a, b, chosen in zip(together, alone, single, strict=True):
            a.accept(chosen)
            b.accept_many([chosen])


def test_a_seed_gives_the_same_tokens_again_and_other_seeds_others() -> None:
    steps = [random_logits(1, seed) for seed in range(30)]

    def run(seed: int) -> list[int]:
        chooser = sampler(seed=seed, temperature=2.0)
        return [token(sample_batch(row, [chooser])) for row in steps]

    assert run(0) == run(0)
    assert run(5) == run(5)
    assert run(5) != run(0)
    assert run(-1) != run(-1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"top_k": 0, "top_p": 1}, [0.113550, 0.005653, 0.839024, 0.041773]),
        ({"top_k": 4, "top_p": 1}, [0.113550, 0.005653, 0.839024, 0.041773]),
        ({"top_k": 2, "top_p": 1}, [0.119203, 0, 0.880797, 0]),
        ({"top_k": 40, "top_p": 0.9}, [0.119203, 0, 0.880797, 0]),
        ({"top_k": 0, "top_p": 0.9}, [0.119203, 0, 0.880797, 0]),
        ({"top_k": 0, "top_p": 1, "min_p": 0.04}, [0.114196, 0, 0.843793, 0.042011]),
        ({"top_k": 3, "top_p": 1, "min_p": 0.04}, [0.114196, 0, 0.843793, 0.042011]),
        ({"top_k": 3, "top_p": 1, "temperature": 2.0}, [0.231224, 0, 0.628532, 0.140244]),
    ],
)
def test_tokens_are_drawn_as_often_as_their_probability_says(options: dict[str, Any], expected: list[float]) -> None:
    n = 20000
    row = np.broadcast_to(logits([1, -2, 3, 0]), (100, 4))
    chooser = sampler(**{"temperature": 1.0, "seed": 7} | options)
    drawn: list[int] = []
    for _ in range(n // 100):
        drawn += [t for t in sample_batch(row, [chooser] * 100) if isinstance(t, int)]
    counts = np.bincount(drawn, minlength=4)
    wanted = np.array(expected) * n
    assert np.all(counts[wanted == 0] == 0)
    possible = wanted > 0
    assert ((counts - wanted)[possible] ** 2 / wanted[possible]).sum() < 20  # chi-square, 3 degrees: p = 0.0002


@pytest.mark.parametrize("temperature", [0.5, 1.0, 8.0])  # 15, 1500 and 20000 tokens make up the 0.9 where it comes first
@pytest.mark.parametrize("order", [("top_p", "temperature"), ("temperature", "top_p")])
def test_top_p_alone_agrees_with_sorting_the_vocabulary(temperature: float, order: tuple[str, str]) -> None:
    for seed in range(10):
        row = random_logits(1, seed)
        ids = transforms.top_k(row[0], 0)
        values = row[:, ids].astype(np.float64)
        keep = transforms.keep_top_p(transforms.softmax(values, temperature if order[0] == "temperature" else 1), np.array([0.9]))
        probs = transforms.softmax(values, temperature) * keep
        expected = ids[transforms.draw(probs, np.array([sampler(seed=seed).uniform()]))]
        assert token(sample_batch(row, [sampler(top_k=0, temperature=temperature, seed=seed, samplers=order)])) == expected


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"top_k": 0}, {"top_k": 5000}, {"top_k": 0, "typical_p": 0.5}])
@pytest.mark.parametrize("n_vocab", [10, 10000])
def test_a_row_without_a_usable_logit_fails_alone(bad: float, options: dict[str, Any], n_vocab: int) -> None:
    data = random_logits(3, n_vocab=n_vocab)
    data[1] = bad
    samplers = [Sampler(SamplingOptions(**options), request_id=f"r{i}") for i in range(3)]
    first, failed, last = sample_batch(data, samplers)
    assert isinstance(first, int)
    assert isinstance(last, int)
    assert isinstance(failed, SampleError)
    assert str(failed).startswith("request r1: no token can be chosen")


@pytest.mark.parametrize("options", [{"temperature": 0}, {}, {"top_k": 0}, {"top_k": 5000}])
def test_masked_and_broken_logits_are_never_chosen(options: dict[str, Any]) -> None:
    data = random_logits(1, n_vocab=10000)
    allowed = {3, 4999, 9999}
    for i in range(10000):
        if i not in allowed:
            data[0, i] = math.nan if i % 2 else -math.inf
    for seed in range(20):
        assert token(sample_batch(data, [sampler(**options, seed=seed)])) in allowed


def test_infinite_logits_win() -> None:
    for seed in range(20):
        assert token(sample_batch(logits([1, math.inf, 3, math.inf]), [sampler(seed=seed)])) in (1, 3)


def test_penalties_reach_back_over_the_window() -> None:
    row = logits([5.0, 4.9, 0.0])
    chooser = sampler(temperature=0, repeat_penalty=1.1, repeat_last_n=2)
    chooser.accept_many([2, 0])
    assert token(sample_batch(row, [chooser])) == 1
    chooser.accept(2)
    chooser.accept(2)  # the 0 has left the window
    assert token(sample_batch(row, [chooser])) == 0


@pytest.mark.parametrize(
    ("n_last", "n_ctx", "expected"),
    [(0, 0, 0), (-1, 0, 1), (-1, 100, 1), (-1, 3, 0), (64, 3, 0), (100, 0, 1)],
)
def test_how_far_the_penalty_window_reaches(n_last: int, n_ctx: int, expected: int) -> None:
    options = SamplingOptions(temperature=0, presence_penalty=1.0, repeat_last_n=n_last)
    chooser = Sampler(options, n_ctx=n_ctx)
    chooser.accept_many([0] + [2] * 70)
    assert token(sample_batch(logits([5.0, 4.9, -9.0]), [chooser])) == expected


def test_frequency_counts_each_occurrence_and_presence_counts_once() -> None:
    row = logits([5.0, 4.0])
    for penalty, times, expected in (("frequency_penalty", 2, 0), ("frequency_penalty", 3, 1), ("presence_penalty", 3, 0)):
        chooser = sampler(temperature=0, **{penalty: 0.4})
        chooser.accept_many([0] * times)
        assert token(sample_batch(row, [chooser])) == expected


def test_rows_and_samplers_must_match() -> None:
    with pytest.raises(ValueError, match="2 samplers"):
        sample_batch(random_logits(1), [sampler(), sampler()])
