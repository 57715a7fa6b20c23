"""What the documents name must exist, and what exists must be named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PUNA = ROOT / "src" / "puna"
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/structure.md")


def test_every_package_has_its_line_in_the_structure() -> None:
    table = (ROOT / "docs" / "structure.md").read_text().partition("## The packages")[2]
    named = set(re.findall(r"^\| `(\w+)/`", table, re.MULTILINE))
    assert named == {path.parent.name for path in PUNA.glob("*/__init__.py")}


def test_every_file_that_the_structure_names_exists() -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / "structure.md").read_text()))
    assert len(named) > 10
    assert {name for name in named if not (PUNA / name).is_file() and not (ROOT / name).is_file()} == set()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_between_documents_lead_somewhere(document: str) -> None:
    path = ROOT / document
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_the_targets_that_are_described_are_those_there_are() -> None:
    described = set(re.findall(r"^\| `make ([\w-]+)`", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony
    assert described == set(phony[1].split()) - {"help", "FORCE"}
    assert described == set(re.findall(r"'make ([\w-]+) ", makefile))
