"""Packed weights that are kept on disk: when a load maps them, when it does not, and what happens to the files."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from puna import packed_files
from puna.ml.backend import Use
from puna.ml.ggml import packed_cache
from puna.ml.ggml.backend import GGMLBackend
from puna.ml.ggml.packed import Packer
from puna.ml.ggml.packed_cache import SEAL_BYTES
from puna.ml.tensor import DType
from puna.native.kernels.library import kernels
from puna.server.app import create_app
from puna.server.placing.scheduler import Scheduler
from puna.settings import Settings
from puna.store.disk.blobs import Blobs
from puna.store.store import Store
from tests import needs
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


def kept(root: Path) -> list[Path]:
    return sorted((root / packed_files.FOLDER).glob("*"))


@contextmanager
def loaded(path: Path, limit: int = LIMIT, **options: Any) -> Iterator[list[Any]]:
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
    dead, alive = (folder / f"{blob.name}.1-ab-{name}{packed_files.UNFINISHED}" for name in ("dead", "alive"))
    other = folder / "notes.txt"
    for file in (orphan, dead, alive, other):
        file.write_text("x")
    os.utime(dead, (1e9, 1e9))
    packed_files.tidy(tmp_path, LIMIT)
    assert kept(tmp_path) == sorted([alive, other])


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
