"""Who works on a store, told to other processes; two Store objects on one folder are as good as two processes here."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from puna.errors import BadRequest, NotFound, StoreError
from puna.store import folder as stores
from puna.store.disk import claims, locks
from puna.store.disk.manifests import StoredManifest
from puna.store.disk.scratch import scratch
from puna.store.models.model import StoredModel
from puna.store.names import Name
from puna.store.progress import Progress
from puna.store.recipe import Recipe
from puna.store.store import Store
from tests.unit.store.at_work import age, is_unfinished
from tests.unit.store.faults import watching
from tests.unit.store.gguf_files import write_model


@pytest.fixture
def other(store: Store) -> Store:
    """The same store in another process."""
    return Store(store.root)


def unfinished(store: Store) -> list[str]:
    return [path.name for path in store.root.rglob("*") if is_unfinished(path)]


def test_what_live_work_makes_stays_however_old_it_is(store: Store, other: Store) -> None:
    with store.work() as work, scratch(work, "pull-") as folder, store.blobs_of(work).writer() as writer:
        (folder / "x").write_bytes(b"x")
        writer.write(b"half")
        blob = store.blobs_of(work).add(b"whole")
        age(store.root)
        other.prune()
        assert (folder / "x").exists()
        assert store.blobs.has(blob.digest)
        assert other.remove_unused([blob.digest]) == ()
        writer.commit()
    assert list(store.blobs) == []
    assert unfinished(store) == []


def test_what_dead_work_left_goes_at_once(store: Store, other: Store, base: str) -> None:
    """However young it is; but for what live work has come to rely on since."""
    dead = store._claims.begin()
    blobs = store.blobs_of(dead)
    gone, shared = blobs.add(b"gone"), blobs.add(b"shared")
    (blobs.folder / f"sha256-{dead.id}{'0' * 16}").write_bytes(b"half")
    used = blobs.add(store.blobs.read(next(iter(store.blobs)), 1 << 20))
    (store.root / "tmp" / f"pull-{dead.id}-x").mkdir(parents=True)
    os.close(dead._descriptor or 0)
    with other.work() as work:
        work.claim([shared.digest])
        other.prune()
        assert not store.blobs.has(gone.digest)
        assert store.blobs.has(shared.digest)
        assert unfinished(store) == [f".work-{work.id}"]
    assert store.blobs.has(used.digest)
    assert store.get(base)


def test_a_base_that_others_delete_stays_while_it_is_used(store: Store, other: Store, base: str) -> None:
    def interfere(_: object) -> None:
        if base in {model.name.removesuffix(":latest") for model in other.list()}:
            other.delete(base)
            age(store.root)
            other.prune()

    model = store.create("child", Recipe(base=base, system="hi"), interfere)
    assert store.get("child").digest == model.digest
    assert [item.name for item in other.list()] == ["child:latest"]


def test_a_file_that_others_used_stays_while_it_is_used(store: Store, other: Store, base: str) -> None:
    """The blob was there before, and the model that had it goes in the middle."""
    digest = store.get(base).model_path.name

    def interfere(progress: Progress) -> None:
        if progress.status == "parsing GGUF":
            other.delete(base)
            age(store.root)
            other.prune()

    store.create("new", Recipe(files={"x.gguf": digest}), interfere)
    assert [item.name for item in other.list()] == ["new:latest"]
    assert store.get("new").model_path.name == digest


def test_uploads_wait_for_their_model(store: Store, other: Store, tmp_path: Path) -> None:
    content = write_model(tmp_path / "x.gguf").read_bytes()
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    with store.upload() as writer:
        writer.write(content)
        writer.commit(digest)
    age(store.root)
    other.prune()
    assert other.remove_unused([digest]) == ()
    store.create("a", Recipe(files={"x.gguf": digest.replace(":", "-")}))
    other.delete("a")
    assert list(store.blobs) == []


def test_uploads_wait_for_a_day(store: Store, other: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with store.upload() as writer:
        writer.write(b"for nothing")
        blob = writer.commit()
    age(store.root)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + stores.UPLOAD_S - 60)
    other.prune()
    assert store.blobs.has(blob.digest)
    monkeypatch.setattr(time, "time", lambda: now + stores.UPLOAD_S + 60)
    other.prune()
    assert not store.blobs.has(blob.digest)


def test_uploads_outlive_the_server_by_an_hour(store: Store, other: Store) -> None:
    """A client that goes on with the next server finds what it has sent."""
    with store.upload() as writer:
        writer.write(b"sent")
        blob = writer.commit()
    store.close()
    other.prune()
    assert other.blobs.has(blob.digest)
    age(store.root)
    other.prune()
    assert not other.blobs.has(blob.digest)
    assert unfinished(store) == []


def test_what_was_asked_for_is_not_deleted_meanwhile(store: Store, other: Store, base: str) -> None:
    digest = store.get(base).model_path.name.replace("-", ":")
    assert store.expects(digest)
    other.delete(base)
    assert list(store.blobs) == [digest]
    assert store.create("again", Recipe(files={"x.gguf": digest}))
    other.delete("again")
    assert list(store.blobs) == []
    assert not store.expects(digest)


def test_asking_again_and_again_is_noted_once(store: Store, base: str) -> None:
    digest = store.get(base).model_path.name.replace("-", ":")
    for _ in range(50):
        assert store.expects(digest)
    (path,) = store.root.glob(".work-*")
    assert len(path.read_text().splitlines()) == 1


def test_a_file_of_claims_does_not_grow_for_ever(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_COMPACT_FROM_BYTES", 500)
    now = time.time()
    with store.work() as work:
        for index in range(100):
            monkeypatch.setattr(time, "time", lambda index=index: now + index)
            work.lend(f"sha256:{index:064}", now + index + 2)
        assert (store.root / f".work-{work.id}").stat().st_size < 1000
        assert len(store._claims.look().claimed()) == 2


def test_claims_that_make_no_sense_are_passed_over(store: Store) -> None:
    with store.work() as work:
        work.claim(["sha256:" + "1" * 64])
        with (store.root / f".work-{work.id}").open("ab") as file:
            file.write(b"\xff\n../../x 1 new\nsha256:" + b"2" * 64 + b" 1")
        assert store._claims.look().claimed() == {"sha256:" + "1" * 64}


def test_a_model_replaced_while_it_is_opened_is_opened_anew(
    store: Store, other: Store, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Store.opened

    def slow(self: Store, stored: StoredManifest) -> StoredModel:
        monkeypatch.setattr(Store, "opened", real)
        other.delete(base)
        other.create(base, Recipe(files={"x.gguf": digest}, system="new"))
        return real(self, stored)

    digest = other.blobs.import_file(write_model(store.root / "x.gguf", seed=9)).digest
    fresh = Store(store.root)
    monkeypatch.setattr(Store, "opened", slow)
    assert fresh.get(base).system == "new"
    monkeypatch.setattr(Store, "opened", lambda self, stored: other.delete(base) or real(self, stored))  # type: ignore[func-returns-value]
    with pytest.raises(NotFound, match=f"^model '{base}' not found$"):
        Store(store.root).get(base)


def test_somebody_holds_the_lock_for_too_long(store: Store, other: Store) -> None:
    with other._lock.held():
        with (
            pytest.raises(locks.StoreBusy, match=r"another process is changing the models in .*; try again"),
            store._lock.held(0.05),
        ):
            pass
        with other._lock.held(0.05):  # its own thread may take it again
            pass
    with store._lock.held(0.05):
        pass


def test_a_start_does_not_wait_long(store: Store, other: Store, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "PRUNE_PATIENCE_S", 0.05)
    blob = store.blobs.add(b"unused")
    age(store.root)
    with other._lock.held():
        store.prune()
        assert store.blobs.has(blob.digest)
    store.prune()
    assert not store.blobs.has(blob.digest)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_a_file_system_without_locks(
    store: Store, base: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int
) -> None:
    """Models can be made and used; nothing is removed, since nobody could be kept from using it."""

    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    fresh = Store(store.root)
    before = set(fresh.blobs)
    fresh.create("child", Recipe(base=base, system="hi"))
    fresh.create("child", Recipe(base=base, system="hello"))
    fresh.copy("child", "copy")
    with fresh.upload() as writer:
        writer.write(b"uploaded")
        digest = writer.commit().digest
    assert fresh.expects(digest)
    assert {model.name for model in fresh.list()} == {"base:latest", "child:latest", "copy:latest"}
    with pytest.raises(StoreError, match="has no locks"):
        fresh.delete("child")
    age(store.root)
    n_blobs = len(list(fresh.blobs))
    fresh.prune()
    assert len(list(fresh.blobs)) == n_blobs > len(before)
    assert fresh.get("child").system == "hello"
    assert unfinished(store) == []


READING: dict[str, Callable[[Store], Any]] = {
    "get": lambda store: store.get("base"),
    "list": lambda store: store.list(),
    "find": lambda store: store.find("BASE"),
    "expects": lambda store: store.expects(store.get("base").model_path.name),
    "read": lambda store: store.blobs.read(next(iter(store.blobs)), 1 << 20),
}
CHANGING: dict[str, Callable[[Store], Any]] = {
    "delete": lambda store: store.delete("base"),
    "copy": lambda store: store.copy("base", "copy"),
    "create": lambda store: store.create("child", Recipe(base="base", system="hi")),
    "upload": lambda store: store.upload(),
    "pull": lambda store: store.pull("pypi:tiny-model==1"),
}


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES], ids=errno.errorcode.get)
def test_a_store_that_can_only_be_read(store: Store, base: str, number: int) -> None:
    def refuse(*_: str) -> None:
        raise OSError(number, os.strerror(number))

    fresh = Store(store.root)
    before = sorted(store.root.rglob("*"))
    with watching(store.root, refuse):
        for use in READING.values():
            assert use(fresh)
        fresh.prune()
        for change in CHANGING.values():
            with pytest.raises(StoreError, match=f"could not be changed: {os.strerror(number)}"):
                change(fresh)
        assert fresh.remove_unused(list(fresh.blobs)) == ()
    assert sorted(store.root.rglob("*")) == before


def test_reading_makes_nothing(store: Store) -> None:
    digest = "sha256:" + "0" * 64
    assert store.list() == []
    assert not store.expects(digest)
    store.prune()
    for use in (store.get, store.delete):
        with pytest.raises(NotFound):
            use("missing")
    with pytest.raises(NotFound):
        store.copy("missing", "x")
    with pytest.raises(BadRequest):
        store.expects("sha256:1")
    assert not store.root.exists()
    assert store.find(Name.parse("missing").full) is None
