"""What several threads use in a library is freed once, and when nobody is in the middle of a call."""

from __future__ import annotations

import threading

import pytest

from puna.native.in_use import InUse
from tests.patience import PATIENCE_S

ADDRESS = 7


def test_it_is_freed_when_the_last_call_has_ended() -> None:
    events: list[object] = []
    thing = InUse("a thing", ADDRESS, events.append)
    closer = threading.Thread(target=thing.close)
    with thing as first, thing:
        assert first == ADDRESS
        closer.start()
        closer.join(0.2)
        events.append("a call ends")
    closer.join(PATIENCE_S)
    assert events == ["a call ends", ADDRESS]


def test_nobody_comes_in_any_more_once_it_is_to_be_freed() -> None:
    freed: list[int] = []
    thing = InUse("a thing", ADDRESS, freed.append)
    thing.close()
    thing.close()
    with pytest.raises(AssertionError, match="a thing is asked that was closed"), thing:
        pass
    assert freed == [ADDRESS]


def test_a_call_that_fails_has_ended_too() -> None:
    freed: list[int] = []
    thing = InUse("a thing", ADDRESS, freed.append)
    with pytest.raises(ZeroDivisionError), thing:
        raise ZeroDivisionError
    thing.close()
    assert freed == [ADDRESS]
