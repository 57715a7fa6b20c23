"""Errors cross from one process of a program to another, as those of its workers do."""

from __future__ import annotations

import pickle

import pytest

from puna import errors
from puna.errors import PunaError

MADE: dict[type[PunaError], PunaError] = {
    errors.ContextOverflow: errors.ContextOverflow(9, 4),
    errors.MissingTensors: errors.MissingTensors(["a", "b"]),
    errors.DiskFull: errors.DiskFull("full", 12),
}
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, PunaError)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_is_the_same_on_the_other_side(kind: type[PunaError]) -> None:
    error = MADE.get(kind) or kind("why")
    error.add_note("item 3 of 4")
    found = pickle.loads(pickle.dumps(error))
    assert (type(found), str(found), vars(found)) == (kind, str(error), vars(error))
