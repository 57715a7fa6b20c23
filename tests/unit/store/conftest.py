from __future__ import annotations

from pathlib import Path

import pytest

from puna.store.recipe import Recipe
from puna.store.store import Store
from tests.mounting import mountable
from tests.unit.store.gguf_files import write_model

# Where nothing may be mounted, or not of such kinds, there is nothing to try.
_NEEDED = {"test_real_disks.py": ("tmpfs", "ext4"), "test_real_clones.py": ("btrfs", "xfs")}
collect_ignore = [file for file, kinds in _NEEDED.items() if not mountable(kinds)]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "models")


@pytest.fixture
def model_digest(store: Store, tmp_path: Path) -> str:
    """A model file that is a blob already."""
    return store.blobs.import_file(write_model(tmp_path / "model.gguf")).digest


@pytest.fixture
def base(store: Store, model_digest: str) -> str:
    """The name of a stored model."""
    store.create("base", Recipe(files={"model.gguf": model_digest}, parameters={"temperature": 0.5, "stop": ["a", "b"]}))
    return "base"
