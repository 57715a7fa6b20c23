from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from puna.cluster.routing.memory import Room, in_order
from puna.errors import OutOfMemory

GB = 10**9
SIZES = st.integers(0, 100)
ROOMS = st.lists(st.builds(Room, st.uuids().map(str), free=SIZES, total=SIZES, idle=SIZES, has_files=st.booleans()), min_size=1)


@given(ROOMS, SIZES)
def test_nobody_leaves_for_a_model_that_fits_elsewhere(rooms: list[Room], n_bytes: int) -> None:
    by_node = {room.node: room for room in rooms}
    if all(room.total < n_bytes for room in rooms):
        with pytest.raises(OutOfMemory):
            in_order(rooms, n_bytes)
        return
    order = [by_node[node] for node in in_order(rooms, n_bytes)]
    assert {room.node for room in order} == {room.node for room in rooms if room.total >= n_bytes}
    fits = [room.free >= n_bytes for room in order]
    assert fits == sorted(fits, reverse=True)


def test_where_the_files_are_comes_first_and_then_where_most_is_free() -> None:
    rooms = [
        Room("small", 2 * GB, 4 * GB),
        Room("full", 1 * GB, 64 * GB, idle=60 * GB),
        Room("busy", 1 * GB, 64 * GB),
        Room("large", 60 * GB, 64 * GB),
        Room("has it", 30 * GB, 32 * GB, has_files=True),
        Room("larger", 62 * GB, 64 * GB),
    ]
    assert in_order(rooms, 20 * GB) == ["has it", "larger", "large", "full", "busy"]


def test_a_model_larger_than_every_node_is_refused_with_the_numbers() -> None:
    with pytest.raises(OutOfMemory, match=r"needs 40\.0 GB, and the largest of 2 nodes has 32\.0 GB"):
        in_order([Room("a", GB, 32 * GB), Room("b", GB, 16 * GB)], 40 * GB)
    with pytest.raises(OutOfMemory, match="0 nodes"):
        in_order([], 1)
