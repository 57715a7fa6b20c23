"""Whose products an engine is given: Puna's own, or ggml's where those are not wanted or missing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from puna.native.kernels import library
from puna.native.kernels.library import Kernels
from tests import needs


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the library would be; it is not there."""
    path = tmp_path / "missing.so"
    monkeypatch.setattr(library, "LIBRARY", path)
    library.kernels.cache_clear()
    yield path
    library.kernels.cache_clear()


def test_without_the_library_ggml_multiplies_and_the_log_says_so(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert library.wanted(True) is None
    assert "were not compiled" in caplog.text
    place.write_text("not a library")
    caplog.clear()
    assert library.wanted(True) is None
    assert "cannot be opened" in caplog.text


@pytest.mark.usefixtures("place")
def test_what_the_log_says_keeps_nothing_of_who_asked(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever keeps records of the log would keep an error's frames with them, and in those the model that is being loaded."""

    class Model:
        pass

    def loaded() -> weakref.ref[Model]:
        model = Model()
        assert library.wanted(True) is None
        return weakref.ref(model)

    model = loaded()
    gc.collect()
    assert len(caplog.records) == 1
    assert model() is None


def test_where_they_are_not_wanted_nothing_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PUNA_KERNELS", "0")
    assert library.wanted() is None
    assert not caplog.records


def test_where_they_are_wanted_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    needs.kernels()
    monkeypatch.setenv("PUNA_KERNELS", "1")
    assert isinstance(library.wanted(), Kernels)
