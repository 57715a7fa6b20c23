"""The books of a cache's cells, where more than the engine's thread looks at them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from puna.kvcache.cells import END, Cells


def test_who_asks_from_another_thread_how_many_are_free_does_not_disturb_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The health of a runner is asked for at any time: here the engine's thread takes cells while the answer is found."""
    cells = Cells(256, 2)
    cells.place(0, np.arange(100, dtype=np.int32))
    cells.remove(0, 50, END)
    count_nonzero = np.count_nonzero

    def interrupted(*arguments: Any) -> Any:
        found = count_nonzero(*arguments)
        monkeypatch.undo()
        cells.place(0, np.arange(50, 60, dtype=np.int32))
        return found

    monkeypatch.setattr(np, "count_nonzero", interrupted)
    assert cells.n_free == 206
    monkeypatch.undo()
    cells.check_integrity()


@given(chunks=st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_where_a_position_lies_does_not_depend_on_its_batch(chunks: list[int]) -> None:
    """Of a sequence that keeps its last 24 positions and forgets more at a time than it must."""
    cells, end = Cells(128, 2), 0
    for n in chunks:
        excess = cells.lengths[1] + n - cells.home_cells
        if excess > 0:
            cells.remove(1, 0, min(end - 24, cells.firsts[1] + max(excess, 16)))
        cells.place(1, np.arange(end, end + n, dtype=np.int32))
        end += n
        cells.check_integrity()
        held = np.arange(cells.firsts[1], end)
        assert np.array_equal(cells.cells_of(1, 0, END), 64 + held % 64)
