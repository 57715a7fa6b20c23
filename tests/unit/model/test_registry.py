from __future__ import annotations

from importlib import import_module
from pathlib import Path

import puna.model.arch
from puna.model.registry import ARCHITECTURES


def test_every_file_in_arch_is_registered_and_every_entry_exists() -> None:
    files = {f"puna.model.arch.{p.stem}" for p in Path(next(iter(puna.model.arch.__path__))).glob("*.py")} - {
        "puna.model.arch.__init__"
    }
    assert {entry.partition(":")[0] for entry in ARCHITECTURES.values()} == files
    for entry in ARCHITECTURES.values():
        module, _, name = entry.partition(":")
        assert callable(getattr(import_module(module), name))
