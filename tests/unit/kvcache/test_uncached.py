from __future__ import annotations

import numpy as np

from puna.kvcache.batch import batch
from puna.kvcache.uncached import Uncached, block_mask


def test_rows_see_their_own_text_and_nothing_else() -> None:
    sees = block_mask(np.array([4, 4, 1, 1, 1, 9], np.int32), np.array([0, 1, 0, 1, 2, 0], np.int32)) == 0
    expected = np.zeros((6, 6), bool)
    expected[:2, :2] = expected[2:5, 2:5] = expected[5:, 5:] = True
    np.testing.assert_array_equal(sees, expected)


def test_a_window_reaches_half_its_width_to_either_side() -> None:
    positions = np.arange(9, dtype=np.int32)
    sees = block_mask(np.zeros(9, np.int32), positions, 5) == 0
    np.testing.assert_array_equal(sees, np.abs(positions[:, None] - positions) <= 2)


def test_nothing_outlives_a_step() -> None:
    cache = Uncached()
    rows = batch([5, 6, 7], [0, 1, 2], [0, 0, 0], [2])
    assert cache.start_forward(rows) == cache.start_reserve(3)
    assert cache.length(0) == 0
    assert cache.can_resume(0, 0)
    assert not cache.can_resume(0, 3)
    assert cache.prepare_restore(0, 3) == 0
