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


def test_the_table_of_models_has_every_architecture_and_its_tests() -> None:
    root = Path(__file__).parents[3]
    rows = [line.split("|") for line in (root / "docs/models.md").read_text().splitlines() if line.startswith("| `")]
    assert [row[1].strip(" `") for row in rows] == sorted(ARCHITECTURES)
    for row in rows:
        assert (root / row[4].strip(" `")).is_file(), row[4]
