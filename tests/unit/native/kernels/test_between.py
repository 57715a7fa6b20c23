"""What stands between products, outside of graphs: every instruction set gives the bits of the portable reference."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puna.native.kernels.library import Kernels
from tests.packed import Floats
from tests.unit.native.kernels.test_library import AVAILABLE, KERNELS

SILU, GELU = 1, 2


@pytest.fixture(params=AVAILABLE)
def own(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    before = KERNELS.instructions
    KERNELS.use(request.param)
    yield KERNELS
    KERNELS.use(before)


def gated(own: Kernels, gate: int, g: Floats, up: Floats) -> Floats:
    y = np.full(len(g) + 16, 12345, np.float32)
    own.puna_gate(gate, g.ctypes.data, up.ctypes.data, y.ctypes.data, len(g))
    assert (y[len(g) :] == 12345).all(), "written beyond the end"
    return y[: len(g)]


def normalised(own: Kernels, x: Floats, weight: Floats, eps: float) -> Floats:
    y = np.full(len(x) + 16, 12345, np.float32)
    own.puna_normalise(x.ctypes.data, weight.ctypes.data, eps, y.ctypes.data, len(x))
    assert (y[len(x) :] == 12345).all(), "written beyond the end"
    return y[: len(x)]


def exact(gate: int, g: Floats) -> np.typing.NDArray[np.float64]:
    wide = g.astype(np.float64)
    slope = wide if gate == SILU else 2 * np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)
    with np.errstate(over="ignore"):
        return np.asarray(wide / (1 + np.exp(-slope)))


@pytest.mark.parametrize("gate", [SILU, GELU])
def test_gates_are_exact(own: Kernels, gate: int) -> None:
    g = np.concatenate([np.linspace(-100, 100, 40001), np.linspace(-1, 1, 4001), [0.0]]).astype(np.float32)
    np.testing.assert_allclose(gated(own, gate, g, np.ones_like(g)), exact(gate, g), rtol=2e-5, atol=1e-30)
    near = np.abs(g) < 10
    np.testing.assert_allclose(gated(own, gate, g, np.ones_like(g))[near], exact(gate, g)[near], rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("gate", [SILU, GELU])
def test_vast_gates_and_no_numbers(own: Kernels, gate: int) -> None:
    g = np.array([1e6, -1e6, 1e30, -1e12, np.nan, np.inf, -np.nan], np.float32)
    found = gated(own, gate, g, np.full_like(g, 2))
    assert np.array_equal(found[[0, 2]], 2 * g[[0, 2]])
    assert (np.abs(found[[1, 3]]) < 1e-20).all()
    assert not np.isfinite(found[4:]).any()


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 200), seed=st.integers(0, 99), gate=st.sampled_from([SILU, GELU]), size=st.sampled_from([1e-3, 1, 30]))
def test_every_instruction_set_gives_the_same_bits(n: int, seed: int, gate: int, size: float) -> None:
    rng = np.random.default_rng(seed)
    g, up = (size * rng.standard_normal((2, n))).astype(np.float32)
    before = KERNELS.instructions
    found = []
    try:
        for name in AVAILABLE:
            KERNELS.use(name)
            found.append((gated(KERNELS, gate, g, up), normalised(KERNELS, g, up, 1e-6)))
    finally:
        KERNELS.use(before)
    for of_gate, of_norm in found:
        assert np.array_equal(of_gate, found[-1][0])
        assert np.array_equal(of_norm, found[-1][1])
    wide = g.astype(np.float64)
    np.testing.assert_allclose(found[0][1], wide / np.sqrt((wide**2).mean() + 1e-6) * up, rtol=1e-5, atol=1e-7)


def test_norms_of_nothing_and_of_no_numbers(own: Kernels) -> None:
    zeros, ones = np.zeros(48, np.float32), np.ones(48, np.float32)
    assert not normalised(own, zeros, ones, 1e-6).any()
    spoilt = ones.copy()
    spoilt[47] = np.nan
    assert np.isnan(normalised(own, spoilt, ones, 1e-6)).all()
