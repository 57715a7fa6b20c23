"""Documents name files and packages that exist, and rooms stay small enough to be taken in at a glance."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "puna"
DOCUMENTS = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
ROOMS = ["server", "runner"]  # a request's way leads through them
MAX_FILES = 10


def names_in(text: str) -> Iterator[str]:
    """What stands in backticks and looks like a file or a folder of this repository."""
    for name in re.findall(r"`([A-Za-z_][\w.-]*(?:/[\w.-]+)*/?)`", text):
        first = name.partition("/")[0]
        is_below = "/" in name and any((base / first).exists() for base in (ROOT, PACKAGE))
        if is_below or name.endswith((".py", "/")):
            yield name


def exists(name: str) -> bool:
    """Also what is built here and kept out of the repository."""
    is_built = name in (ROOT / ".gitignore").read_text().split()
    return is_built or any((base / name).exists() for base in (ROOT, PACKAGE))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_document_names_what_exists(document: Path) -> None:
    gone = sorted({name for name in names_in(document.read_text()) if not exists(name)})
    assert not gone, f"{document.name} names what is not there"


def test_names_are_found_and_told_from_other_things() -> None:
    text = "`server/app.py` in `server/`, `wire.py`, `tests/unit`, `nn/` and `POST /api/chat`, `application/json`, `a/<b>.py`"
    assert list(names_in(text)) == ["server/app.py", "server/", "wire.py", "tests/unit", "nn/"]
    assert all(map(exists, names_in(text)))
    assert not exists("server/routes/chat.py")


def test_the_life_of_a_request_leads_through_every_room_of_the_server_in_order() -> None:
    text = (ROOT / "docs" / "structure.md").read_text()
    chapter = text.partition("## The life of a request\n")[2].partition("\n## ")[0]
    visited = list(dict.fromkeys(re.findall(r"`server/(\w+)/", chapter)))
    rooms = {path.name for path in (PACKAGE / "server").iterdir() if (path / "__init__.py").exists()}
    assert visited == ["process", "http", "apis", "checking", "prompting", "placing", "answering"]
    assert rooms == set(visited)


def test_both_lists_of_packages_have_all_of_them() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    (drawn,) = re.findall(r"^src/puna/\n((?:  \w+/ .*\n)+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert set(re.findall(r"^  (\w+)/", drawn, re.MULTILINE)) == packages
    assert set(re.findall(r"^\| `(\w+)/` \|", (ROOT / "docs" / "structure.md").read_text(), re.MULTILINE)) == packages


def rooms() -> Iterator[Path]:
    for name in ROOMS:
        yield from (path.parent for path in sorted((PACKAGE / name).rglob("__init__.py")))


@pytest.mark.parametrize("room", [*rooms()], ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_has_few_files(room: Path) -> None:
    files = [path.name for path in room.glob("*.py") if path.name != "__init__.py"]
    assert len(files) <= MAX_FILES, f"{room.name}: {sorted(files)}"
