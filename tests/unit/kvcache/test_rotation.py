from __future__ import annotations

import numpy as np
import pytest

from puna.kvcache.rotation import key_turn, value_turn
from puna.ml.turning import hadamard


@pytest.mark.parametrize("width", [64, 128, 256])
def test_the_turn_is_its_own_inverse_and_spreads_a_single_large_channel_over_all(width: int) -> None:
    matrix = hadamard(width)
    np.testing.assert_allclose(matrix @ matrix, np.eye(width), atol=1e-6)
    spike = np.zeros(width, np.float32)
    spike[3] = 100.0
    np.testing.assert_allclose(np.abs(matrix @ spike), 100.0 / np.sqrt(width), rtol=1e-5)


@pytest.mark.parametrize(
    ("dim", "key", "value"), [(64, 64, 64), (96, 0, 0), (128, 128, 64), (192, 64, 64), (256, 256, 64), (576, 64, 64)]
)
def test_keys_turn_by_the_widest_matrix_that_divides_a_head_and_values_by_the_narrowest(dim: int, key: int, value: int) -> None:
    assert (key_turn(dim), value_turn(dim)) == (key, value)
