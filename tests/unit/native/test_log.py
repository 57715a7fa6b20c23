"""What the libraries say in pieces, of several threads at once, is put together again for whoever listens."""

from __future__ import annotations

import logging
import threading

import pytest

from puna.native import log
from puna.native.log import Line, captured

ERROR, INFO, CONTINUES = 4, 2, 5


def say(level: int, text: str) -> None:
    log._lines.add(level, text.encode(), None)


def test_pieces_become_lines() -> None:
    with captured() as heard:
        say(ERROR, "half of ")
        say(CONTINUES, "a line\nand ")
        assert heard == [Line(logging.WARNING, "half of a line")]
        say(CONTINUES, "more\n\n...\n")
    assert heard == [Line(logging.WARNING, "half of a line"), Line(logging.WARNING, "and more")]


def test_one_thread_hears_nothing_of_another_and_loses_nothing_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary is read beside the model's load: what it says may come between a line and its record."""
    told, go_on = threading.Event(), threading.Event()

    def other() -> None:
        with captured() as heard:
            told.wait()
            say(INFO, "of a vocabulary")
            go_on.set()
            say(CONTINUES, ", whole\n")
        others.extend(heard)

    others: list[Line] = []
    beside = threading.Thread(target=other)

    def interrupted(_level: int, _form: str, text: str) -> None:
        if "reason" in text:
            told.set()
            go_on.wait()

    monkeypatch.setattr(log.log, "log", interrupted)
    beside.start()
    with captured() as heard:
        say(ERROR, "the reason\n")
        beside.join()
    assert heard == [Line(logging.WARNING, "the reason")]
    assert others == [Line(logging.DEBUG, "of a vocabulary, whole")]


def test_who_listens_inside_hears_it_too() -> None:
    with captured() as outer:
        with captured() as inner:
            say(ERROR, "both\n")
        say(ERROR, "one\n")
    assert [line.text for line in outer] == ["both", "one"]
    assert [line.text for line in inner] == ["both"]
