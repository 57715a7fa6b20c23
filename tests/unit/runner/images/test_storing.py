"""How much of an image is stored between two steps for cross attention: no more than there is time for, counted, not measured."""

from __future__ import annotations

import numpy as np
import pytest

from puna.runner.images.image import Image, Key, Rows
from puna.runner.images.in_sequence import ImageAt
from puna.runner.images.prices import GROWTH
from puna.runner.images.storing import FEWEST, Storing
from puna.vision.model import Placed, Prepared

ROW_S = 1e-3


class Counted:
    """Rows by sequence; each takes its time."""

    def __init__(self, most_rows: int = 1 << 20) -> None:
        self.most_rows = most_rows
        self.now = 0.0
        self.parts: list[int] = []
        self.rows: dict[int, list[float]] = {}
        self.aborts = 0

    def clock(self) -> float:
        return self.now

    def n_stored(self, sequence: int) -> int:
        return len(self.rows.get(sequence, []))

    def store(self, sequence: int, rows: Rows, begin: int) -> bool:
        assert begin == self.n_stored(sequence)
        self.now += ROW_S * len(rows)
        self.aborts -= 1
        if self.aborts == 0:
            return False
        self.parts.append(len(rows))
        self.rows.setdefault(sequence, []).extend(rows[:, 0].tolist())
        return True


def images(*counts: int) -> list[ImageAt]:
    """One after another; their rows are numbered together."""
    found: list[ImageAt] = []
    first = 0
    for at, n in enumerate(counts):
        image = Image(Key(b"", ""), Prepared([], Placed([0], [0]), n))
        image.rows = np.arange(first, first + n, dtype=np.float32)[:, None]
        found.append(ImageAt(image, at))
        first += n
    return found


@pytest.mark.parametrize("seconds", [0.05, 0.4, 3.0])
def test_no_part_takes_longer_than_there_is_time(seconds: float) -> None:
    homes, shown = Counted(), images(6404)
    storing = Storing(homes, homes.clock)
    longest, turns = 0.0, 0
    while not storing.is_stored(1, shown):
        began = homes.now
        storing.advance(1, shown, seconds)
        longest = max(longest, homes.now - began)
        turns += 1
    assert homes.rows[1] == list(range(6404)), "each once, in order"
    assert max(homes.parts) * ROW_S <= seconds * (1 + 1e-9)
    assert longest <= seconds * (1 + 1e-9)
    assert turns <= 6404 * ROW_S / seconds * 1.5 + 4, "most of the time is used"


def test_parts_grow_from_a_few_rows() -> None:
    homes, shown = Counted(), images(6404)
    storing = Storing(homes, homes.clock)
    storing.advance(0, shown, 100.0)
    assert homes.parts == [FEWEST, FEWEST * GROWTH, FEWEST * GROWTH**2, FEWEST * GROWTH**3, FEWEST * GROWTH**4, 948]
    storing.advance(1, shown, 100.0)
    assert homes.parts[6:] == [6404], "of another image, at once"


def test_no_more_rows_at_once_than_there_is_memory_for() -> None:
    homes, shown = Counted(most_rows=100), images(250)
    Storing(homes, homes.clock).advance(0, shown, 100.0)
    assert homes.parts == [16, 64, 100, 70]
    assert homes.rows[0] == list(range(250))


@pytest.mark.parametrize("most_rows", [3, 7, 1000])
def test_images_beside_one_another_are_stored_one_after_another(most_rows: int) -> None:
    homes, shown = Counted(most_rows), images(10, 3, 8)
    storing = Storing(homes, homes.clock)
    storing.advance(0, shown, 100.0)
    assert homes.rows[0] == list(range(21))
    assert storing.is_stored(0, shown)


def test_what_was_aborted_is_stored_in_the_next_turn() -> None:
    homes, shown = Counted(), images(300)
    storing = Storing(homes, homes.clock)
    homes.aborts = 2
    storing.advance(0, shown, 100.0)
    assert not storing.is_stored(0, shown)
    storing.advance(0, shown, 100.0)
    assert homes.rows[0] == list(range(300))


def test_who_looks_at_nothing_need_not_wait() -> None:
    assert Storing(Counted()).is_stored(0, [])
