"""Several processes and one store: nothing that one relies on is removed by another, and what the dead leave is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from puna.store.recipe import Recipe
from puna.store.store import Store
from tests.unit.store import at_work
from tests.unit.store.gguf_files import write_model
from tests.unit.store.wheels import write_wheel

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store with a keeper, files to bring into it, and a package index."""
    weights = tmp_path / "weights"
    weights.mkdir()
    for seed in range(3):
        write_model(weights / f"{seed}.gguf", seed=seed)
    for seed, version in ((1, "1.0"), (7, "2.0")):
        content = write_model(tmp_path / "x.gguf", seed=seed, general__size_label="1B").read_bytes()
        write_wheel(tmp_path / "links", {"t/x.gguf": content}, version=version, metadata={"LICENSE": b"text 1"})
    store = Store(tmp_path / "models")
    digest = store.blobs.import_file(weights / "0.gguf").digest
    store.create(at_work.KEEPER, Recipe(files={"m.gguf": digest}, system="text 0"))
    return tmp_path


def run(folder: Path, *numbers: int) -> list[str]:
    command = [sys.executable, "-m", "tests.unit.store.at_work", str(folder), *map(str, numbers)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    problems: list[str] = json.loads(done.stdout.splitlines()[-1])
    return [*problems, done.stderr[-4000:]] if problems else []


@pytest.mark.parametrize(("seed", "n_kills"), [(1, 0), (2, 8), (3, 20), (4, 20)])
def test_no_model_is_damaged_and_nothing_is_left(folder: Path, seed: int, n_kills: int) -> None:
    """All work looks older than an hour all the time, so that only locks tell what goes on."""
    assert run(folder, seed, 4, 12, n_kills) == []
    assert at_work.after_a_run(folder) == []


@pytest.mark.thorough
@pytest.mark.parametrize("first", range(0, 200, 25))
def test_two_hundred_interleavings(folder: Path, first: int) -> None:
    """Pulls, creations, copies, deletions and prunes of four processes, some of which are killed; a failure names its seed."""
    assert run(folder, 10_000 + first, 25) == []


def test_a_process_may_die_before_any_change(folder: Path) -> None:
    assert run(folder) == []
