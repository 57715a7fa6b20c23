"""A disk that fills up, at any moment of any change: all is as it was before, and the error says how much is missing."""

from __future__ import annotations

import errno
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from puna.errors import DiskFull, PunaError, SourceError
from puna.store.creating import quantise
from puna.store.recipe import Recipe
from puna.store.sources.packages import pip, pypi
from puna.store.store import Store
from tests.unit.store import at_work
from tests.unit.store.faults import failing_at
from tests.unit.store.gguf_files import write_model
from tests.unit.store.wheels import write_wheel


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "weights").mkdir()
    for seed in range(2):
        write_model(tmp_path / "weights" / f"{seed}.gguf", seed=seed)
    for seed in (1, 2):
        content = write_model(tmp_path / "x.gguf", seed=seed, general__size_label="1B").read_bytes()
        write_wheel(tmp_path / "links", {"t/x.gguf": content}, version=f"{seed}.0", metadata={"LICENSE": b"MIT"})
    store = Store(tmp_path / "models")
    digest = store.blobs.import_file(tmp_path / "weights" / "0.gguf").digest
    store.create(at_work.KEEPER, Recipe(files={"m.gguf": digest}, system="text 0"))
    monkeypatch.setattr(pypi, "Pip", at_work.CopyingPip)
    monkeypatch.setattr(at_work.CopyingPip, "links", tmp_path / "links")
    return tmp_path


def contents(root: Path) -> dict[str, bytes]:
    """All files and folders but those of locks."""
    found = (path for path in root.rglob("*") if path.name != ".lock")
    return {str(path.relative_to(root)): b"" if path.is_dir() else path.read_bytes() for path in found}


MAKING = [at_work.bring, at_work.upload, at_work.replace, at_work.copy, at_work.pull_first, at_work.pull_second]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT], ids=errno.errorcode.get)
@pytest.mark.parametrize("step", MAKING, ids=lambda item: item.__name__)
def test_everything_stays_as_it_was(folder: Path, step: Callable[[Store, Path], None], number: int) -> None:
    root = folder / "models"
    if step is at_work.pull_second:
        at_work.pull_first(Store(root), folder)
    (root / "blobs").mkdir(exist_ok=True)
    before = contents(root)
    for index in range(at_work.MAX_CHANGES):
        with failing_at(index, number, root) as done:
            refusal = attempt(step, root, folder)
        if refusal is None:
            break
        assert f"{refusal.n_missing} more bytes are needed" in str(refusal)
        assert refusal.n_missing > 0
        _check(before, contents(root), done)
    assert index > 5
    assert contents(root) != before


def attempt(step: Callable[[Store, Path], None], root: Path, folder: Path) -> DiskFull | None:
    store = Store(root)
    try:
        step(store, folder)
    except DiskFull as error:
        return error
    finally:
        store.close()
    return None


def _check(before: dict[str, bytes], now: dict[str, bytes], done: list[str]) -> None:
    extra = {name for name in now.keys() - before.keys() if not name.startswith("blobs/")}
    assert {name for name in before if now.get(name) != before[name]} == set(), done
    assert extra == set(), done
    uploaded = now.keys() - before.keys()
    assert len(uploaded) <= 1  # one that was sent whole waits for its model


def test_deleting_works_on_a_full_disk(folder: Path) -> None:
    root = folder / "models"
    with failing_at(0, errno.ENOSPC, root):
        Store(root).delete(at_work.KEEPER)
    assert contents(root) == {"blobs": b"", "manifests": b""}


class _Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_the_room_is_looked_at_before_a_pull(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: _Usage(1000, 990, 10))
    root = folder / "models"
    before = contents(root)
    with pytest.raises(
        DiskFull, match=r"no space left for models in .*: [0-9]+ more bytes are needed \([0-9]+ wanted, 10 free\)"
    ) as full:
        at_work.pull_first(Store(root), folder)
    (wheel,) = (folder / "links").glob("*-1.0-*")
    assert full.value.n_missing == wheel.stat().st_size - 1 - 10
    assert contents(root) == before


def test_what_an_upload_still_lacks_is_said(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    class FullFile:
        def write(self, _: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None:
            return

    with store.upload(1_000_000) as writer:
        writer.write(bytes(400_000))
        writer._file.close()
        monkeypatch.setattr(writer, "_file", FullFile())
        monkeypatch.setattr(shutil, "disk_usage", lambda _: _Usage(10, 0, 100_000))
        with pytest.raises(DiskFull, match=r"500000 more bytes are needed \(600000 wanted, 100000 free\)"):
            writer.write(bytes(100_000))
    assert list(store.blobs) == []


@pytest.mark.parametrize("words", ["ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", ""])
def test_pip_that_finds_no_room(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    script = f"import sys; print('Progress 100 of 5000', flush=True); sys.exit({words!r} or 1)"
    monkeypatch.setattr(sys, "executable", str(fake_python(tmp_path / "python", script)))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: _Usage(10, 0, 4900 if words else 10**6))
    (tmp_path / "work").mkdir()
    with pytest.raises(DiskFull if words else SourceError) as refusal:
        pip.Pip(tmp_path / "work", lambda done, total: None).download(pip.Wheel("tiny-model", "1.0"))
    if words:
        assert "more bytes are needed" in str(refusal.value)


def fake_python(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\nexec {sys.executable} -c {shlex.quote(script)}\n")
    path.chmod(0o755)
    return path


def test_a_conversion_says_about_how_much_it_needs(store: Store, model_digest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("puna.gguf.convert.registry.convert", full)
    monkeypatch.setattr("puna.gguf.convert.checkpoint.Checkpoint", lambda files: files)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: _Usage(10, 0, 0))
    n_bytes = store.blobs.n_bytes(model_digest)
    with pytest.raises(DiskFull, match=f"{n_bytes} more bytes are needed"):
        store.create("x", Recipe(files={"model.safetensors": model_digest}))


@pytest.mark.parametrize("has_room", [False, True])
def test_a_quantisation_that_finds_no_room(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_room: bool) -> None:
    """The process that writes says so in words; what it lacks is known here."""
    reason = "[Errno 28] No space left on device" if not has_room else "the tensors make no sense"
    script = f'print(\'{{"error": "{reason}"}}\')'
    monkeypatch.setattr(quantise, "command_for", lambda *_: [sys.executable, "-c", script])
    digest = store.blobs.import_file(write_model(tmp_path / "f.gguf", file_type=1)).digest
    with pytest.raises(PunaError, match=r"more bytes are needed|make no sense") as refusal:
        store.create("x", Recipe(files={"x.gguf": digest}, quantize="q8_0"))
    assert isinstance(refusal.value, DiskFull) is not has_room
