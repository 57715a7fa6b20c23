"""What the table of classes promises."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from puna.engines import ARCHITECTURES as TEXT
from puna.vision.registry import ARCHITECTURES, PROJECTORS

MODELS = (Path(__file__).resolve().parents[3] / "docs" / "models.md").read_text()
SECTION = MODELS.partition("## Models that see")[2].partition("\n## ")[0]


@pytest.mark.parametrize("name", [*PROJECTORS, *ARCHITECTURES])
def test_what_sees_is_written_down(name: str) -> None:
    assert f"`{name}`" in SECTION


@pytest.mark.parametrize("kind", sorted({*PROJECTORS.values(), *ARCHITECTURES.values()}))
def test_classes_are_there(kind: str) -> None:
    module, _, cls = kind.partition(":")
    assert callable(getattr(import_module(module), cls))


def test_the_other_half_of_a_file_that_holds_both_is_run_here() -> None:
    assert set(ARCHITECTURES) <= set(TEXT)
