"""What cannot be read may name any blob: only what is certainly not there counts as absent."""

from __future__ import annotations

import errno
import logging
import os
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from puna.errors import PunaError, StoreError
from puna.store.names import Name
from puna.store.recipe import Recipe
from puna.store.store import Store
from tests.unit.store.faults import failing

ERRORS = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE, errno.ELOOP, errno.ENOMEM)
PLACES = [
    ("listdir", "manifests"),
    ("listdir", "manifests/registry.ollama.ai"),
    ("listdir", "manifests/registry.ollama.ai/library"),
    ("listdir", "manifests/registry.ollama.ai/library/victim"),
    ("stat", "manifests/registry.ollama.ai/library/victim/latest"),
    ("open", "manifests/registry.ollama.ai/library/victim/latest"),
    ("fdopen", "manifests/registry.ollama.ai/library/victim/latest"),
]


@pytest.fixture
def victim(store: Store, model_digest: str) -> list[Path]:
    """The blobs of a model that shares weights and texts with others, all of them old."""
    for name in ("victim", "other", "third"):
        store.create(name, Recipe(files={"m.gguf": model_digest}, system="shared", licenses=(f"of {name}",)))
    manifest = store.get("victim").manifest
    assert manifest is not None
    paths = [store.blobs.path(layer.digest) for layer in manifest.blobs]
    for path in paths:
        os.utime(path, (1e9, 1e9))
    return paths


def delete(store: Store) -> None:
    store.delete("other")


def copy(store: Store) -> None:
    store.copy("third", "other")


def replace(store: Store) -> None:
    store.create("other", Recipe(base="third", system="changed"))


def prune(store: Store) -> None:
    store.prune()


def remove_unused(store: Store) -> None:
    assert store.remove_unused(list(store.blobs)) == ()


@pytest.mark.parametrize("operation", [delete, copy, replace, prune, remove_unused], ids=lambda item: item.__name__)
@pytest.mark.parametrize("place", PLACES, ids=lambda item: "-".join(item).replace("/", "."))
@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
def test_nothing_is_removed(
    store: Store, victim: list[Path], operation: Callable[[Store], None], place: tuple[str, str], number: int
) -> None:
    fresh = Store(store.root)
    with failing(place[0], store.root / place[1], number), suppress(StoreError):
        operation(fresh)
    assert all(path.exists() for path in victim)
    assert Store(store.root).get("victim").system == "shared"


@pytest.mark.parametrize("place", PLACES[4:], ids=lambda item: item[0])
def test_failed_work_removes_nothing_either(store: Store, victim: list[Path], place: tuple[str, str]) -> None:
    with store.work() as work:
        for path in victim:
            work.bring(path.name.replace("-", ":"), lambda: False)
        with failing(place[0], store.root / place[1], errno.EIO):
            assert store.remove_unused(work.brought, work) == ()
        assert len(work.brought) == len(victim)
    assert all(path.exists() for path in victim)


@pytest.mark.parametrize("operation", [delete, prune, remove_unused], ids=lambda item: item.__name__)
@pytest.mark.parametrize("place", [("listdir", "."), ("open", ".work-{}")], ids=lambda item: item[0])
def test_who_is_at_work_must_be_known_too(
    store: Store, victim: list[Path], operation: Callable[[Store], None], place: tuple[str, str]
) -> None:
    with store.work() as work:
        blob = store.blobs_of(work).add(b"for a model to come")
        os.utime(store.blobs.path(blob.digest), (1e9, 1e9))
        with failing(place[0], store.root / place[1].format(work.id), errno.EACCES), suppress(StoreError):
            operation(Store(store.root))
        assert store.blobs.has(blob.digest)


@pytest.mark.parametrize("place", PLACES[3:], ids=lambda item: item[0])
@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
def test_it_is_said_and_is_not_a_missing_model(store: Store, victim: list[Path], place: tuple[str, str], number: int) -> None:
    """Clients pull what is not found; a server that cannot read answers 500 instead."""
    with failing(place[0], store.root / place[1], number):
        for use in (store.get, store.delete, store.find):
            if place[0] in ("listdir", "open", "fdopen") and use == store.find:
                continue  # whether it is there can be told without these
            if place[0] == "listdir" and use in (store.get, store.delete):
                continue
            with pytest.raises(StoreError, match=f"cannot be read: {os.strerror(number)}"):
                use("victim")
        if place[0] != "listdir":
            with pytest.raises(StoreError):
                store.create("new", Recipe(base="victim"))
            with pytest.raises(StoreError):
                store.copy("victim", "new")
        with pytest.raises(StoreError, match="cannot be read"):
            store.get("pypi:something")
    assert store.get("victim")


def test_others_are_listed(store: Store, victim: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    with (
        failing("open", store.root / PLACES[5][1], errno.EACCES),
        caplog.at_level(logging.WARNING),
    ):
        assert {model.name for model in store.list()} == {"other:latest", "third:latest"}
    assert "the manifest of victim:latest cannot be read: Permission denied" in caplog.text


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_blobs_that_cannot_be_read_are_not_missing(store: Store, victim: list[Path], number: int) -> None:
    model = store.get("victim")
    with failing("stat", model.model_path, number):
        with pytest.raises(StoreError, match="cannot be read"):
            store.get("victim")
        with pytest.raises(StoreError, match="cannot be read"):
            store.blobs.has(model.model_path.name)
        with pytest.raises(StoreError, match="cannot be read"):
            store.blobs.n_bytes(model.model_path.name)


@pytest.mark.parametrize("operation", ["stat", "open"])
def test_a_model_file_that_cannot_be_read_for_a_moment(store: Store, victim: list[Path], operation: str) -> None:
    """What is found out then is not remembered."""
    path = store.get("victim").model_path
    os.utime(path, (1e9 + 1, 1e9 + 1))
    model = Store(store.root).get("victim")
    with failing(operation, path, errno.EMFILE):
        assert model.file is None
        assert model.capabilities == []
    assert model.file is not None
    assert model.capabilities == ["completion"]


def test_a_folder_of_blobs_that_cannot_be_listed(store: Store, victim: list[Path]) -> None:
    with failing("listdir", store.blobs.folder, errno.EIO):
        store.prune()
        with pytest.raises(StoreError, match="cannot be read"):
            list(store.blobs)
    assert all(path.exists() for path in victim)


# The same without injection: with links, limits and permissions.


def test_a_link_in_a_circle(store: Store, victim: list[Path]) -> None:
    path = store.manifests.path(Name.parse("victim"))
    content = path.read_bytes()
    path.unlink()
    path.symlink_to(path)
    for operation in (delete, copy, prune, remove_unused):
        with suppress(PunaError):
            operation(store)
    with pytest.raises(StoreError, match="symbolic links"):
        store.get("victim")
    path.unlink()
    path.write_bytes(content)
    assert all(blob.exists() for blob in victim)
    assert store.get("victim")


@pytest.mark.parametrize(
    "part", ["", "registry.ollama.ai", "registry.ollama.ai/library/victim", "registry.ollama.ai/library/victim/latest"]
)
def test_a_link_to_a_disk_that_is_away(store: Store, victim: list[Path], tmp_path: Path, part: str) -> None:
    """The link is there, so what it leads to is not absent."""
    place, disk = store.manifests.folder / part, tmp_path / "disk"
    place.rename(disk)
    place.symlink_to(disk)
    assert store.get("victim")
    disk.rename(tmp_path / "away")
    for operation in (delete, copy, prune, remove_unused):
        with suppress(PunaError):
            operation(Store(store.root))
    (tmp_path / "away").rename(disk)
    assert all(path.exists() for path in victim)
    assert Store(store.root).get("victim")


def test_no_descriptors_are_left(store: Store, victim: list[Path]) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    fresh = Store(store.root)
    fresh.get("victim")
    n_open = os.open(os.devnull, os.O_RDONLY)
    os.close(n_open)
    for n_left in range(6):
        resource.setrlimit(resource.RLIMIT_NOFILE, (n_open + n_left, limits[1]))
        try:
            for operation in (delete, copy, prune, remove_unused):
                with suppress(PunaError, AssertionError):
                    operation(fresh)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert all(path.exists() for path in victim)
    assert Store(store.root).get("victim")


def test_a_manifest_of_somebody_with_other_names(store: Store, victim: list[Path]) -> None:
    """A newer program's name may not be valid here; what the manifest names is used all the same."""
    path = store.manifests.path(Name.parse("victim"))
    path.rename(path.with_name("+latest"))
    store.delete("other")
    store.delete("third")
    store.prune()
    assert all(blob.exists() for blob in victim)


def test_a_manifest_that_makes_no_sense_keeps_all_blobs(store: Store, victim: list[Path]) -> None:
    path = store.manifests.path(Name.parse("victim"))
    content = path.read_bytes()
    path.write_bytes(content[:-20])
    store.delete("other")
    store.delete("third")
    path.write_bytes(content)
    assert all(blob.exists() for blob in victim)
    path.unlink()
    store.prune()
    assert time.time() - 3600 > 1e9
    assert not any(blob.exists() for blob in victim)


def test_absence_is_still_absence(store: Store, model_digest: str) -> None:
    """A stray file where a folder could be, an empty folder and a long name hide nothing."""
    store.create("a", Recipe(files={"m.gguf": model_digest}))
    (store.manifests.folder / "stray").write_text("x")
    (store.manifests.folder / "host" / "empty").mkdir(parents=True)
    (store.manifests.folder / "host" / "stray").write_text("x")
    assert store.find("h" * 350 + "/n/m") is None
    store.delete("a")
    assert list(store.blobs) == []
