"""How much of an image is computed between two steps: no part takes longer than there is time, as far as is known of its kind.

Time is counted, not measured: each row costs what its stage says.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import pytest

from puna.runner.images.course import Array, States
from puna.runner.images.encoding import Encoding
from puna.runner.images.image import Image, Key
from puna.vision.model import Divided, Piece, Placed, Prepared

N_LAYERS = 4
SEES_ALL = {1, 3}  # the others look at little

LOOK_FOR_S, LOOK_AT_ALL_S, LOOK_AT_FEW_S, ENDS_S = 1e-4, 2e-3, 2e-4, 5e-4


class Counted:
    """A row begins as its number; each layer adds one to a row that saw all rows as they are before the layer."""

    n_layers = N_LAYERS

    def __init__(self) -> None:
        self.now = 0.0
        self.parts: list[tuple[str, int, float]] = []  # what, of how many rows, in what time
        self._seen: dict[int, Array] = {}
        self.aborts = 0

    def clock(self) -> float:
        return self.now

    def _spend(self, what: str, n: int, seconds: float) -> bool:
        self.now += seconds
        self.parts.append((what, n, seconds))
        self.aborts -= 1
        return self.aborts != 0

    def _layer_s(self, index: int) -> float:
        return LOOK_FOR_S + (LOOK_AT_ALL_S if index in SEES_ALL else LOOK_AT_FEW_S)

    def run(self, piece: Piece, states: States | None, begin: int, end: int) -> States | None:
        assert states is not None, "a divided piece begins by rows"
        (rows,) = states
        seconds = sum(self._layer_s(i) for i in range(begin, end)) + (ENDS_S if end == N_LAYERS else 0)
        if not self._spend("layers", end - begin, len(rows) * seconds):
            return None
        rows = rows + (end - begin)
        return [rows[::2] if end == N_LAYERS else rows]

    def by_rows(self, piece: Piece) -> Counted:
        return self

    def begin_rows(self, piece: Piece, begin: int, end: int) -> States | None:
        return [piece.arrays["rows"][begin:end]] if self._spend("begin", end - begin, 0) else None

    def look_for(self, piece: Piece, rows: Array, index: int, begin: int) -> tuple[Array, Hashable] | None:
        self._seen.update((begin + i, row.copy()) for i, row in enumerate(rows))
        if not self._spend("look for", len(rows), len(rows) * LOOK_FOR_S):
            return None
        return rows + 0.5, index in SEES_ALL

    def looked(self, piece: Piece, rows: Array, wanted: Array, index: int, begin: int) -> States | None:
        assert (wanted == rows + 0.5).all()
        assert all((self._seen[i] == i + index).all() for i in range(len(piece.arrays["rows"]))), "all are there, of this layer"
        price = LOOK_AT_ALL_S if index in SEES_ALL else LOOK_AT_FEW_S
        return [rows + 1] if self._spend("looked", len(rows), len(rows) * price) else None

    def end_rows(self, piece: Piece, states: States, begin: int, end: int) -> Array | None:
        (rows,) = states
        assert len(rows) == end - begin
        return rows[::2] if self._spend("end", len(rows), len(rows) * ENDS_S) else None


def image(n: int) -> Image:
    rows = np.arange(n, dtype=np.float32)[:, None]
    piece = Piece({"rows": rows}, Divided(n, (0, n), 2, {"rows": 0}, begins=True))
    return Image(Key(b"", ""), Prepared([piece], Placed([], []), n // 2))


def encoded(encoding: Encoding, one: Image, seconds: float) -> Any:
    encoding.begin(one)
    for _ in range(10_000):
        rows = encoding.advance(seconds)
        if rows is not None:
            return rows
    raise AssertionError("it does not come to an end")


@pytest.mark.parametrize("seconds", [0.15, 0.4, 5.0, 9.0])
def test_no_part_takes_longer_than_there_is_time(seconds: float) -> None:
    """Though one layer of the image takes many times as long; and no turn does either."""
    encoder, n = Counted(), 4096
    assert n * sum(encoder._layer_s(i) for i in range(2)) > seconds
    encoding = Encoding(encoder, encoder.clock)
    encoding.begin(image(n))
    rows, longest = None, 0.0
    while rows is None:
        began = encoder.now
        rows = encoding.advance(seconds)
        longest = max(longest, encoder.now - began)
    assert (rows[:, 0] == np.arange(0, n, 2) + N_LAYERS).all()
    assert max(took for _, _, took in encoder.parts) <= seconds * (1 + 1e-9)
    assert longest <= seconds * (1 + 1e-9)
    # What is computed in parts is computed once, and most of the time that there was is used.
    assert sum(rows for what, rows, _ in encoder.parts if what == "looked") <= N_LAYERS * n
    assert encoder.now <= n * (sum(encoder._layer_s(i) for i in range(N_LAYERS)) + ENDS_S) * (1 + 1e-9)


def test_parts_grow_from_a_few_rows_to_what_there_is_time_for() -> None:
    encoder = Counted()
    encoded(Encoding(encoder, encoder.clock), image(4096), 1.0)
    sizes = [n for what, n, _ in encoder.parts if what == "looked" and n]
    assert sizes[0] == 64
    assert sizes[1] == 256
    at_all = [n for what, n, took in encoder.parts if what == "looked" and took == n * LOOK_AT_ALL_S]
    assert max(at_all) == 448, "whole groups of 64"


def test_whole_layers_go_together_once_their_time_is_known() -> None:
    encoder = Counted()
    encoding = Encoding(encoder, encoder.clock)
    encoded(encoding, image(128), 60.0)
    encoder.parts.clear()
    encoded(encoding, image(128), 60.0)
    assert [what for what, _, _ in encoder.parts] == ["begin", "layers"]
    assert encoder.parts[-1][1] == N_LAYERS


def test_what_was_aborted_begins_anew() -> None:
    encoder = Counted()
    encoding, one = Encoding(encoder, encoder.clock), image(512)
    for at in range(1, 40, 3):
        encoder.aborts = at
        rows = encoded(encoding, one, 0.3)
        assert (rows[:, 0] == np.arange(0, 512, 2) + N_LAYERS).all()
