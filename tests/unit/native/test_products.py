from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from puna.native import products

TYPES = products.weight_types()


@pytest.fixture(scope="module")
def cpu() -> products.Cpu:
    return products.Cpu()


@pytest.mark.parametrize("name", sorted(TYPES))
def test_random_weights_are_finite_and_of_one_scale(name: str) -> None:
    data, values = products.random_weights(TYPES[name], products.N_INPUTS * products.N_OUTPUTS)
    assert values.shape == (products.N_INPUTS * products.N_OUTPUTS,)
    assert np.isfinite(values).all()
    assert 0 < np.abs(values).max() < 8
    assert np.array_equal(products.decode(TYPES[name], data, values.size), values)


def test_formats_of_activations_are_not_weights() -> None:
    assert not {"q8_1", "q8_K", "i32", "i64"} & set(TYPES)
    assert len(TYPES) > 25


@pytest.mark.parametrize("name", ["f32", "q4_K", "q8_0"])
def test_one_wrong_row_of_weights_is_noticed(cpu: products.Cpu, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    genuine = products.random_weights

    def with_a_wrong_row(tensor_type: int, n_elements: int) -> tuple[NDArray[np.uint8], NDArray[Any]]:
        data, values = genuine(tensor_type, n_elements)
        values = values.copy()
        values[5 * products.N_INPUTS : 6 * products.N_INPUTS] *= -1
        return data, values

    assert products._check(cpu, cpu.plain, TYPES[name])["status"] == "ok"
    monkeypatch.setattr(products, "random_weights", with_a_wrong_row)
    answer = products._check(cpu, cpu.plain, TYPES[name])
    assert answer["status"] == "broken"
    assert "wrong result with" in answer["reason"]


def test_a_result_that_is_not_a_number_is_broken(cpu: products.Cpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products.Cpu, "error", lambda *_: float("nan"))
    assert products._check(cpu, cpu.plain, TYPES["f32"])["status"] == "broken"


def test_one_combination_can_be_asked_for() -> None:
    lines = list(products.check("CPU", "q4_0"))
    assert [line.get("status") for line in lines] == [None, "trying", "ok", None]
    assert lines[-1] == {"finished": True}
