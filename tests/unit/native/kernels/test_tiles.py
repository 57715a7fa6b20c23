"""Tiles of AMX are used where they were seen to compute rightly."""

from __future__ import annotations

import pytest

from puna.errors import NativeLibraryError
from puna.native.kernels import library
from puna.native.kernels.build import LIBRARY
from puna.native.kernels.library import Kernels
from tests import needs
from tests.unit.native.kernels.test_library import AVAILABLE

needs.kernels()


def test_a_processor_is_believed_about_tiles_only_after_the_check(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(library.FORCED, raising=False)
    own = Kernels(str(LIBRARY))
    has = own.puna_has_instructions
    monkeypatch.setattr(own, "puna_has_instructions", lambda name: name == b"amx" or has(name))
    monkeypatch.setattr(own, "puna_check_instructions", lambda name: name != b"amx")
    assert "amx" not in own.available()
    assert own.refused == ["amx"]
    assert "computes wrongly with its instructions amx" in caplog.text
    monkeypatch.setattr(library, "kernels", lambda: own)
    assert "computes wrongly with amx" in library.in_words()
    with pytest.raises(NativeLibraryError, match="amx: this processor has"):
        own._select("amx")
    own.refused.clear()
    monkeypatch.setattr(own, "puna_check_instructions", lambda _name: True)
    assert own.available()[0] == "amx"


def test_what_this_processor_computes_with_passes_the_check() -> None:
    own = library.kernels()
    assert [name for name in AVAILABLE if not own.puna_check_instructions(name.encode())] == []
    assert not own.puna_check_instructions(b"abacus")
