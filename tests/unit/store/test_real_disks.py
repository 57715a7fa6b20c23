"""The store on disks of its own that are really full.

Mounting is for the administrator: elsewhere these tests are not collected (conftest.py), and a full disk is tried by errors that
are injected alone (test_disk_full.py, test_registry.py).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from puna.errors import DiskFull, NotFound
from puna.store.recipe import Recipe
from puna.store.sources.elsewhere import Elsewhere
from puna.store.sources.web import download
from puna.store.store import Store
from tests.mounting import free_bytes, mountable, mounted
from tests.registries import Registry
from tests.unit.store.test_registry import pull, write_large

DISKS = mountable(("tmpfs", "ext4"))
STEP_BYTES = 24 << 10

pytestmark = pytest.mark.thorough


@contextmanager
def room_of(disk: Path, n_bytes: int) -> Iterator[None]:
    """No more than so many bytes are left meanwhile."""
    ballast = disk / "ballast"
    descriptor = os.open(ballast, os.O_RDWR | os.O_CREAT)
    try:
        with suppress(OSError):  # a file system keeps some of what it calls free for its own lists
            while (n_over := free_bytes(disk) - n_bytes) > 0:
                os.write(descriptor, bytes(min(n_over, 1 << 20)))
                os.fsync(descriptor)
        yield
    finally:
        os.close(descriptor)
        ballast.unlink()


class _Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture
def _room_is_said_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise nothing would begin that does not fit: here it ends where the disk does."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: _Usage(1 << 40, 0, 1 << 40))
    monkeypatch.setattr(download, "MIN_PART_BYTES", 100_000)


def contents(root: Path) -> dict[str, bytes]:
    found = (path for path in root.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


@pytest.fixture(params=DISKS)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    with mounted(request.param, tmp_path) as found:
        yield found


@pytest.fixture
def here(disk: Path, tmp_path: Path) -> Store:
    """With one model, which must not be harmed."""
    store = Store(disk / "models", elsewhere=Elsewhere(key_path=tmp_path / "home" / "id_ed25519"))
    blob = store.blobs.import_file(write_large(tmp_path / "own.gguf", 1))
    store.create("own", Recipe(files={"m.gguf": blob.digest}, system="mine"))
    return store


def refusal(action: Callable[[], object]) -> DiskFull | None:
    try:
        action()
    except DiskFull as error:
        return error
    return None


@pytest.mark.usefixtures("_room_is_said_to_be_there")
def test_a_pull_onto_a_disk_that_is_full_at_any_byte(disk: Path, here: Store, tmp_path: Path) -> None:
    there = Store(tmp_path / "there")
    blob = there.blobs.import_file(write_large(tmp_path / "other.gguf", 2))
    there.create("o", Recipe(files={"m.gguf": blob.digest}, system="theirs"))
    before, own, room = contents(here.root), here.get("own"), 0
    with Registry().running() as registry:
        registry.add(there, "o", "library/o:latest")
        reference = f"{registry.netloc}/library/o"

        def attempt() -> None:
            with room_of(disk, room):
                pull(here, reference)

        while (refused := refusal(attempt)) is not None:
            assert refused.n_missing > 0
            now = contents(here.root)
            assert {name: now.get(name) for name in before} == before
            assert here.get("own") == own
            with pytest.raises(NotFound):
                here.get(reference)
            room += STEP_BYTES
    assert room > 3 * STEP_BYTES
    assert here.blobs.read(blob.digest, blob.n_bytes) == there.blobs.read(blob.digest, blob.n_bytes)
    assert not [name for name in contents(here.root) if "-partial" in name]


@pytest.mark.usefixtures("_room_is_said_to_be_there")
def test_a_creation_on_a_disk_that_is_full_at_any_byte(disk: Path, here: Store, tmp_path: Path) -> None:
    source, before, own, room = write_large(tmp_path / "other.gguf", 2), contents(here.root), here.get("own"), 0

    def attempt() -> None:
        with room_of(disk, room):
            digest = here.blobs.import_file(source).digest
            here.create("new", Recipe(files={"m.gguf": digest}, system="new"))

    while (refused := refusal(attempt)) is not None:
        assert refused.n_missing > 0
        now = contents(here.root)
        assert {name: now.get(name) for name in before} == before
        assert not [name for name in now.keys() - before.keys() if "manifests" in name]
        assert here.get("own") == own
        room += STEP_BYTES
    assert room > 10 * STEP_BYTES
    assert here.get("new").model_path.read_bytes() == source.read_bytes()
