"""Each transform against a reference that is slow and obvious."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from puna.sample import transforms
from puna.sample.sampler import Sampler
from puna.sample.transforms import BLOCK, Doubles, Floats
from puna.wire import SamplingOptions

# A few distinct values make ties, infinities and NaN likely.
logit = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 3.4e38, -3.4e38, 1e-45]),
    st.floats(-100, 100, width=32),
)
rows = st.lists(logit, min_size=1, max_size=40).map(lambda values: np.array(values, np.float32))
finite_rows = st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=40).map(lambda v: np.array(v, np.float32))
share = st.one_of(st.sampled_from([0.0, 1e-10, 0.5, 0.95, 1.0]), st.floats(0, 1))


def naive_top_k(row: Floats, k: int) -> list[int]:
    values = [-math.inf if math.isnan(x) else float(x) for x in row]
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    return [i for i in order if values[i] > -math.inf][: k if k > 0 else None]


def naive_softmax(values: Floats, temperature: float) -> list[float]:
    scaled = [(float(v) - float(max(values))) / temperature for v in values]
    total = math.fsum(math.exp(v) for v in scaled)
    return [math.exp(v) / total for v in scaled]


def one(p: float) -> Doubles:
    return np.array([p])


def probabilities(*logits: float) -> Doubles:
    row = np.array(logits, np.float32)
    return transforms.softmax(row[transforms.top_k(row, 0)][None])


@given(rows, st.integers(-1, 50))
def test_top_k_is_the_start_of_a_full_sort(row: Floats, k: int) -> None:
    assert transforms.top_k(row, k).tolist() == naive_top_k(row, k)


@given(
    st.integers(0, 2**32),
    st.integers(1, 60),
    st.integers(200 * BLOCK, 260 * BLOCK),
    st.sampled_from(["normal", "ties", "constant", "ascending", "few finite", "NaN", "clustered"]),
)
def test_top_k_by_blocks_is_the_start_of_a_full_sort(seed: int, k: int, n_vocab: int, kind: str) -> None:
    rng = np.random.default_rng(seed)
    row = rng.standard_normal(n_vocab).astype(np.float32)
    if kind == "ties":
        row = np.round(row)
    elif kind == "constant":
        row[:] = 1
    elif kind == "ascending":
        row.sort()
    elif kind == "few finite":
        row[rng.random(n_vocab) > 0.001] = -np.inf
    elif kind == "NaN":
        row[rng.random(n_vocab) > 0.9] = np.nan
    elif kind == "clustered":  # the best elements share blocks
        row[:: n_vocab // BLOCK] += 100
    before = row.copy()
    assert transforms.top_k(row, k).tolist() == naive_top_k(row, k)
    np.testing.assert_array_equal(row, before)


@pytest.mark.parametrize(("k", "count"), [(5, 5), (20, 12), (-1, 12), (0, 12), (1, 1)])
def test_top_k_counts(k: int, count: int) -> None:
    row = np.array([0.026, 0.043, 0.1, -0.2, 0.9, 0.31, -1.4, 2, 0.0, 0.5, -3, 0.7], np.float32)
    ids = transforms.top_k(row, k)
    assert len(ids) == count
    assert np.all(np.diff(row[ids]) <= 0)


@given(rows)
def test_argmax_is_the_first_of_top_k(row: Floats) -> None:
    best = naive_top_k(row, 1)
    assert transforms.argmax(row) == (best[0] if best else -1)


@given(st.integers(1000, 1300), st.integers(0, 2**32 - 1), st.booleans())
def test_descending_sorts_equal_values_by_index(n: int, seed: int, spread: bool) -> None:
    random = np.random.default_rng(seed)  # a thousand draws of Hypothesis's take longer than all else here
    row = random.choice(np.array([0.0, -0.0, 1.5, -1.5, math.inf, -math.inf], np.float32), n)
    if spread:
        row += random.standard_normal(n).astype(np.float32)
    assert transforms.descending(row).tolist() == sorted(range(len(row)), key=lambda i: (-float(row[i]), i))


@given(finite_rows, st.sampled_from([1e-9, 0.1, 0.8, 1.0, 5.0, 1e9]))
def test_softmax_agrees_with_the_definition(row: Floats, temperature: float) -> None:
    probs = transforms.softmax(row[None], temperature)[0]
    np.testing.assert_allclose(probs, naive_softmax(row, temperature), rtol=1e-9, atol=1e-15)
    assert probs.sum() == pytest.approx(1.0, abs=1e-9)


def test_softmax_of_four_logits() -> None:
    probs = transforms.softmax(np.array([[1, -2, 3, 0]], np.float32))[0]
    np.testing.assert_allclose(probs, [0.113550, 0.005653, 0.839024, 0.041773], atol=1e-6)


@pytest.mark.parametrize(
    "row",
    [[5.0], [2.0] * 7, [1e30, 1e30, 0], [1e-30, -1e-30], [-5, -600, -7], [500, -500, 0, 3], [math.inf, 1], [-math.inf, 0]],
)
def test_softmax_sums_to_one(row: list[float]) -> None:
    probs = transforms.softmax(np.array([row], np.float32))[0]
    assert probs.sum() == pytest.approx(1.0)
    assert np.isfinite(probs).all()
    assert probs.argmax() == np.argmax(row)


def test_a_temperature_scales_the_distance_to_the_greatest() -> None:
    row = np.array([[3, 1, 0]], np.float32)
    for temperature, factor in ((0.5, 2.0), (1.0, 1.0), (2.0, 0.5)):
        log_ratio = np.log(transforms.softmax(row, temperature)[0])
        np.testing.assert_allclose(log_ratio[0] - log_ratio, factor * np.array([0, 2, 3]))
    np.testing.assert_array_equal(transforms.softmax(row, 1e-7)[0], [1, 0, 0])


@given(finite_rows, share)
def test_top_p_keeps_the_shortest_prefix_above_p(row: Floats, p: float) -> None:
    probs = np.sort(transforms.softmax(row[None]))[:, ::-1]
    keep = transforms.keep_top_p(probs, one(p))[0]
    kept, total = 0, 0.0
    for prob in probs[0]:
        kept, total = kept + 1, total + prob
        if total > p:
            break
    if p == 1:
        kept = len(row)
    assert keep.tolist() == [True] * kept + [False] * (len(row) - kept)


@pytest.mark.parametrize(("p", "least", "most"), [(1.0, 7, 7), (0.95, 1, 3), (0.0, 1, 1), (1e-10, 1, 1)])
def test_top_p_counts(p: float, least: int, most: int) -> None:
    keep = transforms.keep_top_p(probabilities(-3, -2, -1, 0, 1, 2, 4), one(p))
    assert least <= keep.sum() <= most


@pytest.mark.parametrize(("p", "least", "most"), [(1.0, 1, 1), (0.2, 1, 3), (1e-9, 8, 8)])
def test_min_p_counts(p: float, least: int, most: int) -> None:
    keep = transforms.keep_min_p(np.array([[4.0, 3, 2, 1, 0, -1, -2, -3]]), one(p))
    assert least <= keep.sum() <= most


@given(finite_rows, share.filter(lambda p: p > 0))
def test_min_p_keeps_what_is_near_the_likeliest(row: Floats, p: float) -> None:
    keep = transforms.keep_min_p(row[None], one(p))[0]
    assert keep.tolist() == [float(x) >= float(max(row)) + math.log(p) for x in row]
    assert keep.any()


@given(finite_rows, share)
def test_typical_p_keeps_the_least_surprising_surprises(row: Floats, p: float) -> None:
    probs = np.sort(transforms.softmax(row[None]))[:, ::-1]
    keep = transforms.keep_typical_p(probs, one(p))[0]
    if p == 1:
        assert keep.all()
        return
    with np.errstate(divide="ignore"):
        distance = np.abs(-np.log(probs[0]) - np.cumsum([-q * math.log(q) if q > 0 else 0.0 for q in probs[0]])[-1])
    assert probs[0][keep].sum() > p or keep.sum() == len(row) or probs[0].sum() <= p
    kept = distance[keep]
    assert len(kept) >= 1
    if not keep.all():
        assert kept.max() <= distance[~keep].min() + 1e-9
        assert probs[0][keep].sum() - probs[0][keep][kept.argmax()] <= p + 1e-9  # without the last one it is too little


def test_typical_p_may_drop_the_likeliest() -> None:
    """With one likely token and many rare ones, the rare ones carry the typical surprise."""
    probs = np.array([[0.2] + [0.01] * 80])
    keep = transforms.keep_typical_p(probs, one(0.505))[0]
    assert not keep[0]
    assert keep.sum() == 51


@given(
    finite_rows,
    st.dictionaries(st.integers(-3, 60), st.integers(1, 9), max_size=10),
    st.floats(0.1, 3),
    st.floats(-2, 2),
    st.floats(-2, 2),
)
def test_penalties_agree_with_the_definition(
    row: Floats, seen: dict[int, int], repeat: float, presence: float, frequency: float
) -> None:
    before = row.copy()
    given = SamplingOptions(
        repeat_penalty=repeat, presence_penalty=presence, frequency_penalty=frequency, repeat_last_n=-1, seed=1
    )
    sampler = Sampler(given)
    sampler.accept_many([token for token, count in seen.items() for _ in range(count)])
    result = sampler.rescored(row)
    expected = [float(x) for x in row]
    for token, count in seen.items():
        if 0 <= token < len(row):
            expected[token] = expected[token] / repeat if expected[token] > 0 else expected[token] * repeat
            expected[token] -= count * frequency + presence
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(row, before)


def test_penalties_bear_infinite_logits() -> None:
    row = np.array([math.inf, -math.inf, 3e38, -3e38], np.float32)
    sampler = Sampler(SamplingOptions(repeat_penalty=1e6, presence_penalty=1e6, frequency_penalty=-1e6, seed=1))
    sampler.accept_many(range(4))
    result = sampler.rescored(row)
    assert result[0] == math.inf
    assert result[1] == -math.inf
    assert result[3] == -math.inf


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30).filter(lambda w: sum(w) > 1e-9), st.floats(0, 1, exclude_max=True))
def test_draw_inverts_the_cumulated_weights(weights: list[float], uniform: float) -> None:
    index = int(transforms.draw(np.array([weights]), np.array([uniform]))[0])
    assert weights[index] > 0
    total = np.cumsum(weights)
    assert total[index] >= uniform * total[-1] * (1 - 1e-12)
    assert index == 0 or total[index - 1] <= uniform * total[-1] * (1 + 1e-12)


@pytest.mark.parametrize("uniform", [0.0, 0.5, math.nextafter(1.0, 0.0)])
def test_draw_never_takes_weight_zero(uniform: float) -> None:
    weights = np.array([[0, 0, 0.1, 0, 0.7, 0, 0]])
    assert transforms.draw(weights, np.array([uniform]))[0] in (2, 4)
