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


def test_recipes_name_files_that_exist_and_words_in_them() -> None:
    recipes = (ROOT / "CONTRIBUTING.md").read_text().partition("## Adding an architecture")[2]
    assert recipes.count("\n## Adding ") == 4
    paths = set(re.findall(r"`((?:src|tests|docs)/[\w/.-]+)`", recipes))
    assert len(paths) > 20
    assert {path for path in paths if not (ROOT / path).exists()} == set()
    for words, path in {
        ("SAMPLERS", "class SamplingOptions", "class LoadOptions"): "src/puna/wire.py",
        ("SAMPLERS", "_STEPS", "class Options"): "src/puna/api/options.py",
        ("_changes_anything",): "src/puna/sample/sampler.py",
        ("ARCHITECTURES",): "src/puna/engines.py",
        ("class Row",): "tests/models/row.py",
        ("SAMPLES", "OPTIONS", "EFFECTS"): "tests/contract/test_every_field.py",
        ("def source_of", "def is_reference"): "src/puna/store/sources/reference.py",
        ("def fetch", "def permit"): "src/puna/store/sources/source.py",
        ("SUPPORTED",): "tests/unit/test_settings.py",
    }.items():
        text = (ROOT / path).read_text()
        assert all(word in text for word in words), path
