"""Tiles of AMX are used where they were seen to compute rightly."""

from __future__ import annotations

import subprocess
import sys

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


def test_the_check_needs_no_word_of_ended_processes() -> None:
    """Who starts a server may have told the system to tell nobody of children that end, which programs inherit."""
    checks = "from puna.native.kernels.library import kernels; print(kernels().puna_check_instructions(b'portable'))"
    command = [sys.executable, "-c", f"import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); {checks}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout == "True\n", done.stderr
