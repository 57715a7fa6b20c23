from __future__ import annotations

from importlib import import_module
from pathlib import Path

from tools import models_table

import puna.model.arch
from puna.model.registry import ARCHITECTURES
from tests.models.table import EMBEDDERS, ENCODERS, ROWS


def test_every_file_in_arch_is_registered_and_every_entry_exists() -> None:
    files = {f"puna.model.arch.{p.stem}" for p in Path(next(iter(puna.model.arch.__path__))).glob("*.py")} - {
        "puna.model.arch.__init__"
    }
    assert {entry.partition(":")[0] for entry in ARCHITECTURES.values()} == files
    for entry in ARCHITECTURES.values():
        module, _, name = entry.partition(":")
        assert callable(getattr(import_module(module), name))


def test_every_architecture_has_a_row_of_tests_and_every_row_an_architecture() -> None:
    assert {name.partition(":")[0] for name in (*ROWS, *ENCODERS, *EMBEDDERS)} == set(ARCHITECTURES)


def test_the_table_of_models_is_made_of_the_rows() -> None:
    document = models_table.DOCUMENT.read_text()
    assert models_table.written(document) == document, "python -m tools.models_table writes it anew"
