from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import puna.store
from tests.patience import PATIENCE_S

MAX_FILES = 10


def test_the_folder_of_models_needs_neither_sources_nor_creating() -> None:
    code = "import sys, puna.store.folder; print(*(name for name in sys.modules if name.startswith('puna.store.')))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    ).stdout.split()
    assert "puna.store.folder" in loaded
    assert not [name for name in loaded if name.startswith(("puna.store.sources", "puna.store.creating"))]


def test_no_room_is_crowded() -> None:
    root = Path(puna.store.__file__).parent
    rooms = {path.parent for path in root.rglob("*.py")}
    assert len(rooms) > 4
    for room in rooms:
        files = sorted(path.name for path in room.glob("*.py") if path.name != "__init__.py")
        assert len(files) <= MAX_FILES, f"{room.relative_to(root)}: {files}"
