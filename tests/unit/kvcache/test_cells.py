"""The books of a cache's cells, where more than the engine's thread looks at them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

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
