"""Places along the axes of M-RoPE."""

from __future__ import annotations

from puna.vision.mrope import patch_places, placed


def test_patches_have_their_row_and_column_cell_by_cell() -> None:
    rows, columns, *others = patch_places(2, 4, 2).tolist()
    assert rows == [0, 0, 1, 1, 0, 0, 1, 1]
    assert columns == [0, 1, 0, 1, 2, 3, 2, 3]
    assert others == [[0] * 8] * 2


def test_rows_stand_at_one_time_and_what_follows_behind_the_furthest() -> None:
    found = placed(2, 3, 50, 51, 52)
    assert list(found.tokens) == [50, *[51] * 6, 52]
    assert list(found.rows) == [-1, 0, 1, 2, 3, 4, 5, -1]
    assert found.axes is not None
    time, height, width, other = found.axes.tolist()
    assert time == [0, 1, 1, 1, 1, 1, 1, 4]
    assert height == [0, 1, 1, 1, 2, 2, 2, 4]
    assert width == [0, 1, 2, 3, 1, 2, 3, 4]
    assert other == [0] * 8
    assert found.n_positions == 5
    assert placed(7, 2, 50, 51, 52).n_positions == 9
