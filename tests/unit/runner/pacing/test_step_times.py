"""What the estimate makes of machines whose times are known: formulas, with noise, interruptions and changes of speed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from puna.runner.pacing.pace import FIRST_TOKENS, GROWTH, Pace, Prices, Work, work
from puna.runner.pacing.step_times import StepTimes
from puna.runner.scheduling.schedule import Progress, schedule

TARGET_S = 0.15
N_BATCH = 512
Formula = Callable[[Work], float]

# In seconds: two cores and a small model, a large GPU, and one whose steps take the same up to a size.
SMALL_CPU = Prices(0.006, 0.003, 0.0035, 0.0029, 1.2e-6)
GPU = Prices(0.005, 0.004, 1e-4, 2e-5, 1e-9)


def with_a_knee(done: Work) -> float:
    return max(0.005, 1e-4 * (done.decoded + done.prompt))


@dataclass
class Machine:
    """Computes steps of some who decode and of prompts that come one after another, as the schedule has it."""

    formula: Formula
    noise: float = 0.03
    interrupted: float = 0.0  # share of the steps that take twenty times as long
    slowness: float = 1.0
    n_decoding: int = 7
    times: StepTimes = field(default_factory=lambda: StepTimes(TARGET_S))
    chance: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))
    position: int = 200

    def step(self, parts: list[tuple[int, int]]) -> float:
        done = work(parts)
        seconds = self.formula(done) * self.slowness * float(np.exp(self.noise * self.chance.normal()))
        self.times.note(done, seconds * (20 if self.chance.random() < self.interrupted else 1))
        self.position += 1
        return seconds

    def decode(self, n_steps: int) -> None:
        for _ in range(n_steps):
            self.step([(self.position, 1)] * self.n_decoding)

    def compute(self, n_prompt: int) -> list[tuple[int, float]]:
        """A prompt's tokens and the seconds of each step."""
        steps, done = [], 0
        while done < n_prompt:
            requests = [Progress(self.position, self.position + 1)] * self.n_decoding + [Progress(done, n_prompt)]
            counts = schedule(requests, N_BATCH, self.times.pace)
            seconds = self.step([(r.n_computed, n) for r, n in zip(requests, counts, strict=True) if n])
            steps.append((counts[-1], seconds))
            done += counts[-1]
        return steps


def late(steps: list[tuple[int, float]]) -> float:
    """What 95 of 100 steps took at most."""
    return float(np.quantile([seconds for _, seconds in steps], 0.95))


@pytest.mark.parametrize("interrupted", [0.0, 0.05], ids=["undisturbed", "interrupted"])
def test_steps_beside_decoding_take_as_long_as_they_may(interrupted: float) -> None:
    machine = Machine(SMALL_CPU.of, interrupted=interrupted)
    machine.decode(20)
    steps = machine.compute(4000)[8:]
    assert late(steps) < 1.15 * TARGET_S
    assert np.median([seconds for _, seconds in steps]) > 0.75 * TARGET_S  # and not much less


@pytest.mark.parametrize("formula", [GPU.of, with_a_knee], ids=["linear", "knee"])
def test_a_fast_machine_soon_gets_full_batches(formula: Formula) -> None:
    machine = Machine(formula)
    machine.decode(20)
    sizes = [n for n, _ in machine.compute(6000)]
    assert sizes[:5] == [32, 64, 128, 256, N_BATCH - 7]
    assert set(sizes[5:-1]) == {N_BATCH - 7}


def test_a_cold_start_tries_little_first() -> None:
    pace = StepTimes(TARGET_S).pace
    assert pace == Pace(TARGET_S, Prices(), FIRST_TOKENS)
    machine = Machine(SMALL_CPU.of)
    assert machine.compute(1000)[0][0] == FIRST_TOKENS


def test_the_first_step_may_take_very_long() -> None:
    machine = Machine(GPU.of)
    machine.times.note(work([(0, 30)]), 60.0)
    machine.decode(20)
    assert sum(n > 400 for n, _ in machine.compute(6000)) > 8


def test_what_prompts_cost_is_not_forgotten_over_a_long_answer() -> None:
    machine = Machine(SMALL_CPU.of)
    machine.compute(2000)
    machine.decode(3000)
    assert late(machine.compute(600)) < 1.25 * TARGET_S


def test_a_machine_that_others_want_as_well_gets_less_to_do_and_then_more_again() -> None:
    machine = Machine(SMALL_CPU.of, n_decoding=2)
    machine.compute(2000)
    calm = [n for n, _ in machine.compute(1500)[5:-1]]
    machine.slowness = 1.7
    busy = machine.compute(1500)[10:-1]
    machine.slowness = 1.0
    machine.decode(16)
    again = [n for n, _ in machine.compute(1500)[10:-1]]
    assert late(busy) < 1.25 * TARGET_S
    assert np.median([n for n, _ in busy]) < 0.7 * np.median(calm)
    assert np.median(again) > 0.75 * np.median(calm)


def test_one_interrupted_step_changes_little() -> None:
    machine = Machine(SMALL_CPU.of, noise=0.0)
    machine.compute(2000)
    before = machine.times.pace.prices
    machine.times.note(work([(500, 1)] * 7 + [(0, 32)]), 30.0)
    after = machine.times.pace.prices
    done = work([(300, 1)] * 7 + [(1000, 32)])
    assert after.of(done) == pytest.approx(before.of(done), rel=0.1)


def test_depth_is_learnt() -> None:
    prices = Prices(step=0.01, decoded=0.001, prompt=0.001, cell=2e-7)
    machine = Machine(prices.of, noise=0.0)
    machine.decode(5)
    steps = machine.compute(30000)[10:]
    assert late(steps) < 1.1 * TARGET_S
    assert steps[-2][0] < 0.5 * steps[0][0]


steps_of_any_kind = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 200_000), st.integers(1, 4096)), min_size=1, max_size=20),
        st.floats(1e-5, 1e4),
    ),
    max_size=40,
)


@given(steps_of_any_kind)
def test_prices_are_finite_and_not_negative_whatever_was_measured(steps: list[tuple[list[tuple[int, int]], float]]) -> None:
    times = StepTimes(TARGET_S)
    most = 0
    for parts, seconds in steps:
        done = work(parts)
        times.note(done, seconds)
        most = max(most, done.prompt)
    pace = times.pace
    assert np.isfinite(pace.prices).all()
    assert min(pace.prices) >= 0
    assert pace.most_tokens == max(FIRST_TOKENS, GROWTH * most)


@given(st.tuples(*[st.floats(0, 1)] * 5), st.floats(0, 100), st.integers(0, 200_000), st.integers(0, 100_000))
def test_as_many_tokens_are_bought_as_the_time_pays_and_no_more(
    numbers: tuple[float, ...], seconds: float, begin: int, most: int
) -> None:
    prices = Prices(*numbers)
    n = prices.tokens_for(seconds, begin, most)
    assert 0 <= n <= most
    assert prices.of_prompt(begin, n) <= seconds * 1.000001 + 1e-9
    assert n == most or prices.of_prompt(begin, n + 1) >= seconds * 0.999999
