"""Packed weights that are kept on disk: when a load maps them, when it does not, and what happens to the files."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from puna import packed_files
from puna.gguf.reader import GGUFFile
from puna.ml.backend import Use
from puna.ml.ggml import packed_cache, packed_origin
from puna.ml.ggml.backend import GGMLBackend
from puna.ml.ggml.packed import Packer
from puna.ml.ggml.packed_cache import SEAL_BYTES
from puna.ml.tensor import DType
from puna.native.kernels.library import kernels
from puna.runner.engine import Engine
from puna.server.app import create_app
from puna.server.placing.scheduler import Scheduler
from puna.settings import Settings
from puna.store.disk.blobs import Blobs
from puna.store.store import Store
from puna.wire import LoadOptions, LoadRequest
from tests import needs
from tests.patience import wait_until
from tests.tiny import write_llama

LIMIT = 1 << 30
NAMES = ("blk.0.ffn_up.weight", "blk.1.attn_output.weight")


@pytest.fixture(autouse=True)
def small_models_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cache, "KEPT_FROM_BYTES", 0)


@pytest.fixture
def packings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tensors that are packed, as they are."""
    packed: list[str] = []
    original = Packer.pack

    def pack(self: Packer, source: int, parts: Any, target: int) -> None:
        packed.extend(part.name for part in parts)
        original(self, source, parts, target)

    monkeypatch.setattr(Packer, "pack", pack)
    return packed


def add(root: Path, seed: int = 0, dtype: str = "q4_K") -> Path:
    """A model's blob in the folder of models *root*."""
    blobs = root / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    path = write_llama(root / "model.gguf", seed=seed, dtype=dtype)
    blob = blobs / f"sha256-{hashlib.sha256(path.read_bytes()).hexdigest()}"
    return path.rename(blob)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's file in no folder of models, written long enough ago on a disk that stamps changes."""
    monkeypatch.setattr(packed_origin, "SETTLED_NS", 0)
    monkeypatch.setattr(packed_origin, "stamps_changes", lambda _path: True)
    (tmp_path / "downloads").mkdir()
    return write_llama(tmp_path / "downloads" / "model.gguf", dtype="q4_K")


def change(path: Path, how: Callable[[Path, bytes], object], content: bytes) -> None:
    """Until it shows in the time of change, whose clock may be coarse; all other times are put back."""
    before, after = path.stat(), path.stat()
    while after.st_ctime_ns == before.st_ctime_ns:
        how(path, content)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def write_into(path: Path, content: bytes) -> None:
    """Without an end of file in its midst, which whoever has it mapped would not survive."""
    with open(path, "r+b") as file:
        file.write(content)


def replace(path: Path, content: bytes) -> None:
    other = path.with_name("other")
    other.write_bytes(content)
    other.rename(path)


def kept(root: Path) -> list[Path]:
    return sorted((root / packed_files.FOLDER).glob("*"))


@contextmanager
def loaded(path: Path | GGUFFile, limit: int = LIMIT, **options: Any) -> Iterator[list[Any]]:
    """What two matrices make of an input; on the way out all is written that is to be."""
    needs.kernels()
    backend = GGMLBackend(path, n_threads=1, kernels=kernels(), packed_cache_bytes=limit, **options)
    try:
        weights = [backend.tensor(name, Use.MATRIX) for name in NAMES]
        backend.allocate()
        backend.load(lambda _share: None)
        context = backend.context(32)
        x = context.input(DType.F32, 256, 3)
        products = [weight.mul_mat(x) for weight in weights]
        for product in products:
            context.output(product)
        context.set(x, np.random.default_rng(1).standard_normal((3, 256), np.float32))
        assert context.compute()
        yield [context.values(product).copy() for product in products]
        if backend._weights._cache:
            backend._weights._cache.wait()
        context.close()
    finally:
        backend.close()


@pytest.mark.parametrize("dtype", ["q4_K", "f16", "mxfp4"])
def test_the_second_load_maps_what_the_first_packed(tmp_path: Path, packings: list[str], dtype: str) -> None:
    blob = add(tmp_path, dtype=dtype)
    with loaded(blob) as first:
        pass
    assert packings == list(NAMES)
    (file,) = kept(tmp_path)
    packings.clear()
    with loaded(blob) as second:
        assert str(file) in Path("/proc/self/maps").read_text()
    assert not packings
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert kept(tmp_path) == [file]


@pytest.mark.parametrize("damage", ["shorter", "longer", "header", "data", "a byte", "the seal"])
def test_a_file_that_is_not_the_model_s_is_made_again(tmp_path: Path, packings: list[str], damage: str) -> None:
    blob = add(tmp_path)
    with loaded(blob) as first:
        pass
    (file,) = kept(tmp_path)
    content = file.read_bytes()
    other = bytes(len(content) - 4096)
    middle = len(content) // 2  # of a row that is not compared with the model's
    spoilt = {
        "shorter": content[:-64],
        "longer": content + b"0",
        "header": content.replace(NAMES[0].encode(), NAMES[0].upper().encode()),
        "data": content[:4096] + other,
        "a byte": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "the seal": content[:-SEAL_BYTES] + bytes(SEAL_BYTES),
    }[damage]
    file.write_bytes(spoilt)
    packings.clear()
    with loaded(blob) as second:
        pass
    assert packings == list(NAMES)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert file.read_bytes()[:-SEAL_BYTES] == content[:-SEAL_BYTES]


def test_the_whole_file_is_checked_once_for_each_state_that_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written, or checked before, is as it was while its inode and its time are."""
    blob, checked = add(tmp_path), []
    original = packed_cache._digest

    def digest(data: Any) -> bytes:
        checked.append(data.size)
        return original(data)

    monkeypatch.setattr(packed_cache, "_digest", digest)
    with loaded(blob):
        pass
    (file,) = kept(tmp_path)
    checked.clear()

    def touch() -> None:
        os.utime(file)  # as whoever writes to it leaves it

    def copy() -> None:
        shutil.copy2(file, tmp_path / "copy")
        (tmp_path / "copy").rename(file)

    for change in (None, touch, None, copy, None):
        if change:
            change()
        with loaded(blob):
            assert str(file) in Path("/proc/self/maps").read_text()
        assert len(checked) == (change is not None)
        checked.clear()


def test_another_layout_is_another_file(tmp_path: Path, packings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    blob = add(tmp_path)
    with loaded(blob):
        pass
    packings.clear()
    monkeypatch.setattr(packed_cache, "LAYOUT", "next")
    with loaded(blob):
        pass
    assert packings == list(NAMES)
    assert len(kept(tmp_path)) == 2


def test_a_folder_holds_no_more_than_its_limit_and_forgets_what_was_not_used(tmp_path: Path) -> None:
    blobs = [add(tmp_path, seed) for seed in range(3)]
    with loaded(blobs[0]):
        pass
    (first,) = kept(tmp_path)
    limit = 2 * first.stat().st_size + 1000
    with loaded(blobs[1], limit):
        pass
    (second,) = {*kept(tmp_path)} - {first}
    for age, file in ((200, first), (100, second)):
        os.utime(file, (file.stat().st_mtime - age,) * 2)
    with loaded(blobs[0], limit):  # used again
        pass
    with loaded(blobs[2], limit):
        pass
    assert first in kept(tmp_path)
    assert second not in kept(tmp_path)
    assert len(kept(tmp_path)) == 2


def test_nothing_is_kept_where_it_is_not_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blob = add(tmp_path)
    with loaded(blob, 0):
        pass
    with loaded(blob, 100_000):  # less than the model's
        pass
    with loaded(write_llama(tmp_path / "alone.gguf", dtype="q4_K")):
        pass
    monkeypatch.setattr(packed_cache, "KEPT_FROM_BYTES", 64 << 20)  # packed as soon as mapped
    with loaded(blob):
        pass
    assert not kept(tmp_path)


def test_a_full_disk_or_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blob = add(tmp_path)
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=1000))
        with loaded(blob) as products:
            assert len(products) == 2
    assert not kept(tmp_path)
    (tmp_path / packed_files.FOLDER).rmdir()
    (tmp_path / packed_files.FOLDER).write_text("in the way")
    with loaded(blob) as products:
        assert len(products) == 2


def test_closing_ends_the_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs.kernels()
    blob = add(tmp_path)
    monkeypatch.setattr(packed_cache, "_CHUNK_BYTES", 64)
    backend = GGMLBackend(blob, n_threads=1, kernels=kernels(), packed_cache_bytes=LIMIT)
    backend.tensor(NAMES[0], Use.MATRIX)
    backend.allocate()
    cache = backend._weights._cache
    assert cache is not None
    cache._is_closed.set()  # before the first chunk
    backend.load(lambda _share: None)
    backend.close()
    assert not kept(tmp_path)


def test_what_belongs_to_no_blob_or_was_not_finished_goes(tmp_path: Path) -> None:
    blob, folder = add(tmp_path), tmp_path / packed_files.FOLDER
    folder.mkdir()
    orphan = folder / f"sha256-{'0' * 64}.1-ab"
    names = ("dead", "left", "alive")
    dead, left, alive = (folder / f"{blob.name}.1-ab-{name}{packed_files.UNFINISHED}" for name in names)
    other = folder / "notes.txt"
    for file in (orphan, dead, left, alive, other):
        file.write_text("x")
    with open(dead, "rb") as hung, open(alive, "rb") as writer, open(left, "rb") as ended:
        for held in (hung, writer, ended):
            packed_files.hold(held)
        ended.close()  # as when its process ends
        os.utime(dead, (1e9, 1e9))
        packed_files.tidy(tmp_path, LIMIT)
        assert kept(tmp_path) == sorted([alive, other])


def test_what_is_being_written_is_left_alone_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blob, original, seen = add(tmp_path), os.fsync, []

    def fsync(descriptor: int) -> None:
        packed_files.tidy(tmp_path, LIMIT)
        seen.append([path.name.endswith(packed_files.UNFINISHED) for path in kept(tmp_path)])
        original(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with loaded(blob):
        pass
    assert seen == [[True]]
    (file,) = kept(tmp_path)
    assert not file.name.endswith(packed_files.UNFINISHED)


def test_a_blob_that_is_removed_takes_its_packed_weights_along(tmp_path: Path) -> None:
    blobs = [add(tmp_path, seed) for seed in (0, 1)]
    for blob in blobs:
        with loaded(blob):
            pass
    Blobs(tmp_path / "blobs").remove(blobs[0].name.replace("-", ":"))
    (left,) = kept(tmp_path)
    assert left.name.startswith(blobs[1].name)


def test_a_server_that_is_to_keep_none_removes_them_when_it_starts(tmp_path: Path) -> None:
    with loaded(add(tmp_path)):
        pass
    settings, store = Settings(models=tmp_path, packed_cache=0, no_prune=True), Store(tmp_path, keep_unused=True)

    async def start() -> None:
        app = create_app(settings, store, Scheduler(settings))
        async with app.router.lifespan_context(app):
            assert not (tmp_path / packed_files.FOLDER).exists()

    asyncio.run(start())


def test_a_file_elsewhere_is_packed_once(tmp_path: Path, elsewhere: Path, packings: list[str]) -> None:
    models = tmp_path / "home" / "models"  # which nobody has made so far
    with loaded(elsewhere, models=models) as first:
        pass
    assert packings == list(NAMES)
    (file,) = kept(models)
    packings.clear()
    link = tmp_path / "link.gguf"
    link.symlink_to(elsewhere)
    for path in (elsewhere, link):
        with loaded(path, models=models) as again:
            assert str(file) in Path("/proc/self/maps").read_text()
        assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not packings
    assert kept(models) == [file]
    assert [path.name for path in elsewhere.parent.iterdir()] == [elsewhere.name]


@pytest.mark.parametrize("how", ["written to", "replaced", "touched"])
def test_a_file_elsewhere_that_has_changed_is_packed_anew(tmp_path: Path, elsewhere: Path, packings: list[str], how: str) -> None:
    """Although its size and its time of modification are as they were; of its former state nothing stays."""
    models, new = tmp_path / "models", write_llama(tmp_path / "new.gguf", seed=7, dtype="q4_K")
    with loaded(elsewhere, models=models) as before:
        pass
    (former,) = kept(models)
    content = (elsewhere if how == "touched" else new).read_bytes()
    change(elsewhere, replace if how == "replaced" else write_into, content)
    packings.clear()
    with loaded(elsewhere, models=models) as after:
        pass
    assert packings == list(NAMES)
    assert (how == "touched") == all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    (now,) = kept(models)
    assert now != former
    packings.clear()
    with loaded(elsewhere, models=models) as again:
        pass
    assert not packings
    assert all(np.array_equal(a, b) for a, b in zip(after, again, strict=True))


@pytest.mark.parametrize("how", ["written to", "replaced", "removed"])
def test_a_file_elsewhere_that_changes_while_it_is_packed_is_not_kept(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    content, original = elsewhere.read_bytes(), Packer.pack

    def pack(self: Packer, source: int, parts: Any, target: int) -> None:
        original(self, source, parts, target)
        if parts[0].name == NAMES[0]:
            if how == "removed":
                elsewhere.unlink()
            else:
                change(elsewhere, replace if how == "replaced" else write_into, content)

    monkeypatch.setattr(Packer, "pack", pack)
    with loaded(elsewhere, models=tmp_path / "models"):
        pass
    assert not kept(tmp_path / "models")


@pytest.mark.parametrize("when", ["before it is prepared", "before it is mapped"])
def test_a_file_that_is_replaced_after_it_was_opened_gets_nothing_that_is_kept(
    tmp_path: Path, elsewhere: Path, packings: list[str], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    models, content, original = tmp_path / "models", elsewhere.read_bytes(), GGMLBackend.allocate

    def allocate(self: GGMLBackend) -> None:
        if when == "before it is mapped":
            replace(elsewhere, content)
        original(self)

    with loaded(elsewhere, models=models):
        pass
    files = kept(models)
    monkeypatch.setattr(GGMLBackend, "allocate", allocate)
    packings.clear()
    with GGUFFile.open(elsewhere) as opened:
        if when == "before it is prepared":
            replace(elsewhere, content)
        with loaded(opened, models=models):
            pass
    assert packings == list(NAMES)
    assert kept(models) == files


def test_packed_weights_of_one_file_under_the_name_of_another_s_are_not_used(
    tmp_path: Path, elsewhere: Path, packings: list[str]
) -> None:
    """Not even of one that differs in a single weight."""
    models, other = tmp_path / "models", tmp_path / "other.gguf"
    with GGUFFile.open(elsewhere) as opened:
        info = opened.tensors[NAMES[0]]
    content = bytearray(elsewhere.read_bytes())
    content[info.offset + info.n_bytes // 2 // 144 * 144 + 20] ^= 1  # of a row that is not compared with the model's
    other.write_bytes(content)
    with loaded(elsewhere, models=models) as first:
        pass
    (file,) = kept(models)
    with loaded(other, models=models) as expected:
        pass
    (second,) = {*kept(models)} - {file}
    shutil.copyfile(file, second)
    packings.clear()
    with loaded(other, models=models) as found:
        pass
    assert packings == list(NAMES)
    assert not np.array_equal(first[0], expected[0])
    assert all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True))


def test_two_loads_of_a_file_elsewhere_at_once_leave_one_file(tmp_path: Path, elsewhere: Path, packings: list[str]) -> None:
    models = tmp_path / "models"
    with loaded(elsewhere, models=models) as first, loaded(elsewhere, models=models) as second:
        pass
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    (file,) = kept(models)
    packings.clear()
    with loaded(elsewhere, models=models):
        assert str(file) in Path("/proc/self/maps").read_text()
    assert not packings


def test_a_file_elsewhere_is_not_kept_where_that_could_not_be_believed(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = tmp_path / "models"
    with monkeypatch.context() as patch:
        patch.setattr(packed_origin, "SETTLED_NS", 10**18)  # it has changed a moment ago
        with loaded(elsewhere, models=models):
            pass
    with monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: elsewhere.stat().st_ctime_ns - 1)  # or will change
        with loaded(elsewhere, models=models):
            pass
    with monkeypatch.context() as patch:
        patch.setattr(packed_origin, "stamps_changes", lambda _path: False)
        with loaded(elsewhere, models=models):
            pass
    with loaded(elsewhere, 0, models=models):
        pass
    with loaded(elsewhere):  # there is no folder of models
        pass
    assert not kept(models)
    with loaded(elsewhere, models=models):
        pass
    assert kept(models)


def test_nowhere_to_keep_a_file_elsewhere_is_no_error(tmp_path: Path, elsewhere: Path) -> None:
    (tmp_path / "models").write_text("in the way")
    with loaded(elsewhere, models=tmp_path / "models") as products:
        assert len(products) == 2


def test_a_limit_holds_for_blobs_and_files_elsewhere_together(tmp_path: Path, elsewhere: Path) -> None:
    blob = add(tmp_path)
    with loaded(elsewhere, models=tmp_path):
        pass
    (file,) = kept(tmp_path)
    os.utime(file, (file.stat().st_mtime - 100,) * 2)
    with loaded(blob, file.stat().st_size + 1000):
        pass
    (left,) = kept(tmp_path)
    assert left.name.startswith(blob.name)


def test_what_is_kept_of_a_file_elsewhere_goes_when_nobody_has_used_it_for_a_month(tmp_path: Path, elsewhere: Path) -> None:
    with loaded(elsewhere, models=tmp_path):
        pass
    (file,) = kept(tmp_path)
    used_at = file.stat().st_mtime
    for days, is_there in ((29, True), (31, False)):
        os.utime(file, (used_at - days * 86400,) * 2)
        packed_files.tidy(tmp_path, LIMIT)
        assert file.exists() == is_there


def test_a_runner_keeps_files_elsewhere_in_the_folder_that_it_is_told(
    tmp_path: Path, elsewhere: Path, packings: list[str]
) -> None:
    needs.kernels()
    models = tmp_path / "models"
    for is_second in (False, True):
        packings.clear()
        engine = Engine(elsewhere)
        try:
            options = LoadOptions(n_ctx=64, n_threads=1, models=str(models))
            assert engine.load(LoadRequest(options=options)).success
            wait_until(lambda: engine.health().status == "ready")  # noqa: B023 - it is waited for here
            backend: Any = engine.loop.model.backend
            backend._weights._cache.wait()
        finally:
            engine.close()
        assert bool(packings) != is_second
        assert len(kept(models)) == 1


MOUNT = "31 27 254:0 / /data rw,relatime{own} shared:1 master:2 - {kind} /dev/sda1 rw,{all}"


@pytest.mark.parametrize(
    ("kind", "own", "all_mounts", "expected"),
    [
        *((kind, "", "errors=continue", True) for kind in ("ext4", "ext3", "xfs", "btrfs", "f2fs")),
        *(
            (kind, "", "size=1", False)
            for kind in ("nfs4", "cifs", "9p", "fuse.sshfs", "vfat", "exfat", "tmpfs", "overlay", "ext")
        ),
        ("ext4", ",lazytime", "discard", False),
        ("ext4", "", "discard,lazytime", False),
    ],
)
def test_which_file_systems_are_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, own: str, all_mounts: str, expected: bool
) -> None:
    path, mounts = tmp_path / "model.gguf", tmp_path / "mounts"
    path.write_bytes(b"x")
    descriptor = os.open(path, os.O_PATH)
    facts = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
    os.close(descriptor)
    number = next(line for line in facts.splitlines() if line.startswith("mnt_id:")).split()[1]
    listed = MOUNT.format(kind=kind, own=own, all=all_mounts).replace("31 ", f"{number} ", 1)
    mounts.write_text("\n".join([MOUNT.format(kind="nfs", own="", all="x").replace("31 ", "999999 ", 1), listed]))
    monkeypatch.setattr(packed_origin, "MOUNTS", mounts)
    assert packed_origin.stamps_changes(str(path)) == expected
    mounts.write_text(MOUNT.format(kind="ext4", own="", all="x").replace("31 ", "999999 ", 1))
    assert not packed_origin.stamps_changes(str(path)), "the mount is not listed"
    assert not packed_origin.stamps_changes(str(tmp_path / "none.gguf"))
