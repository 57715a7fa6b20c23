"""Model files that other programs keep on this machine: found, and told from what is no model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from puna.store.sources.strangers import Stranger, find
from tests.unit.store.gguf_files import write_model

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """The hub's cache: blobs, and snapshots of links to them."""
    repository = tmp_path / "hub" / "models--ann--Tiny-GGUF"
    (repository / "blobs").mkdir(parents=True)
    snapshot = repository / "snapshots" / REVISION
    (snapshot / "nested").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(REVISION)
    write_model(repository / "blobs" / "aaaa")
    write_model(repository / "blobs" / "bbbb", seed=1)
    (repository / "blobs" / "cccc").write_text("{}")
    os.symlink("../../blobs/aaaa", snapshot / "tiny-Q4_K_M.gguf")
    os.symlink("../../../blobs/bbbb", snapshot / "nested" / "tiny-Q8_0.gguf")
    os.symlink("../../blobs/cccc", snapshot / "config.json")
    os.symlink("../../blobs/gone", snapshot / "broken.gguf")
    return tmp_path / "hub"


@pytest.fixture
def studio(tmp_path: Path) -> Path:
    folder = tmp_path / "studio" / "bob" / "Other-GGUF"
    folder.mkdir(parents=True)
    write_model(folder / "other.gguf")
    write_model(folder / "mmproj-other.gguf", architecture="clip")
    write_model(folder / "big-00001-of-00002.gguf", split__count=2)
    (folder / "notes.gguf").write_text("no model")
    return tmp_path / "studio"


def test_models_are_found_where_they_lie(hub: Path, studio: Path, tmp_path: Path) -> None:
    found = {item.path: item for item in find([hub, studio, tmp_path / "nowhere"])}
    snapshot = hub / "models--ann--Tiny-GGUF" / "snapshots" / REVISION
    assert set(found) == {
        snapshot / "tiny-Q4_K_M.gguf",
        snapshot / "nested" / "tiny-Q8_0.gguf",
        studio / "bob" / "Other-GGUF" / "other.gguf",
    }
    tiny = found[snapshot / "tiny-Q4_K_M.gguf"]
    assert isinstance(tiny, Stranger)
    assert (tiny.n_bytes, tiny.family, tiny.quantization) == (tiny.path.stat().st_size, "llama", "F16")


def test_one_file_under_two_revisions_is_one_model(hub: Path) -> None:
    repository = hub / "models--ann--Tiny-GGUF"
    later = repository / "snapshots" / ("f" * 40)
    later.mkdir()
    os.symlink("../../blobs/aaaa", later / "tiny-Q4_K_M.gguf")
    (repository / "refs" / "main").write_text("f" * 40)
    names = [item.path.relative_to(repository).parts[1] for item in find([hub]) if item.path.name == "tiny-Q4_K_M.gguf"]
    assert names == ["f" * 40]


def test_a_loop_of_links_ends(hub: Path) -> None:
    os.symlink(hub, hub / "models--ann--Tiny-GGUF" / "snapshots" / "again")
    assert len(find([hub])) == 2


def test_a_folder_that_may_not_be_read_is_passed_over(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.scandir

    def refused(path: object) -> object:
        if str(path).endswith("nested"):
            raise PermissionError(13, "Permission denied")
        return real(path)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "scandir", refused)
    assert [item.path.name for item in find([hub])] == ["tiny-Q4_K_M.gguf"]
