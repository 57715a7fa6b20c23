from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from puna.errors import BadRequest, FileFormatError, NotFound
from puna.store.disk.blobs import Blobs, parse_digest

HELLO = "sha256:" + hashlib.sha256(b"hello").hexdigest()


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    return Blobs(tmp_path / "blobs")


def names(blobs: Blobs) -> list[str]:
    return sorted(os.listdir(blobs.folder)) if blobs.folder.exists() else []


def test_a_blob_is_named_by_its_hash(blobs: Blobs) -> None:
    blob = blobs.add(b"hello")
    assert (blob.digest, blob.n_bytes, blob.is_new) == (HELLO, 5, True)
    assert names(blobs) == [HELLO.replace(":", "-")]
    assert blobs.read(HELLO, 100) == b"hello"
    assert not blobs.add(b"hello").is_new


def test_both_spellings_of_a_digest_are_one() -> None:
    assert parse_digest(HELLO.replace(":", "-")) == HELLO


@pytest.mark.parametrize(
    "digest",
    [
        "",
        "sha256:",
        "sha256:" + "0" * 63,
        "sha256:" + "0" * 65,
        "sha256:" + "g" * 64,
        "sha256:" + "A" * 64,
        "sha256:../../../../etc/passwd",
        "sha256:" + "../" * 21 + "0",
        "sha512:" + "0" * 64,
        "sha256:" + "0" * 64 + "\n",
        "\0sha256:" + "0" * 64,
        "sha256:" + "٠" * 64,  # digits, but not ours
    ],
)
def test_malformed_digests_make_no_path(blobs: Blobs, digest: str) -> None:
    for use in (blobs.path, blobs.has, blobs.remove, blobs.n_bytes):
        with pytest.raises(BadRequest, match=r"^invalid digest format$"):
            use(digest)


@given(st.text(max_size=90))
def test_any_accepted_digest_stays_in_the_folder(text: str) -> None:
    folder = Path("/store/blobs")
    try:
        path = Blobs(folder).path(text)
    except BadRequest:
        return
    assert path.parent == folder


def test_a_wrong_digest_keeps_nothing(blobs: Blobs) -> None:
    with blobs.writer() as writer:
        writer.write(b"other")
        with pytest.raises(BadRequest, match=r'digest mismatch, expected ".*", got ".*"'):
            writer.commit(HELLO)
    assert names(blobs) == []


def test_an_interrupted_write_keeps_nothing(blobs: Blobs) -> None:
    writer = blobs.writer()
    writer.write(b"hel")
    writer.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert names(blobs) == []


def test_an_unfinished_blob_is_not_visible(blobs: Blobs) -> None:
    with blobs.writer() as writer:
        writer.write(b"hello")
        assert not blobs.has(HELLO)
        assert list(blobs) == []
        writer.commit(HELLO)
    assert list(blobs) == [HELLO]


@pytest.mark.parametrize("link", [False, True])
def test_importing_a_file(blobs: Blobs, tmp_path: Path, link: bool) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"hello")
    seen: list[tuple[int, int]] = []
    blob = blobs.import_file(path, link=link, on_bytes=lambda done, total: seen.append((done, total)))
    assert blob.digest == HELLO
    assert blobs.path(HELLO).samefile(path) == link
    assert seen[-1] == (5, 5)
    assert not blobs.import_file(path, link=link).is_new


def test_a_clone_is_taken_where_the_file_system_has_them(blobs: Blobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It shares no name with the file, which may be changed afterwards."""
    path = tmp_path / "file"
    path.write_bytes(b"hello")

    def clone(source: int, target: int) -> bool:
        os.write(target, os.pread(source, 1000, 0))
        return True

    monkeypatch.setattr("puna.store.disk.blobs.clone", clone)
    assert blobs.import_file(path, link=True).digest == HELLO
    assert not blobs.path(HELLO).samefile(path)
    assert names(blobs) == [blobs.path(HELLO).name]


def test_without_clones_and_links_a_file_is_copied_with_progress(blobs: Blobs, tmp_path: Path) -> None:
    """As between two file systems."""
    shared = Path("/dev/shm")
    if os.stat(shared).st_dev == os.stat(tmp_path).st_dev:
        pytest.fail("/dev/shm is on the same file system as temporary files: another is needed for this test")
    with tempfile.TemporaryDirectory(dir=shared) as other:
        path = Path(other) / "file"
        path.write_bytes(b"hello")
        seen: list[tuple[int, int]] = []
        blob = blobs.import_file(path, link=True, on_bytes=lambda done, total: seen.append((done, total)))
        assert (blob.digest, seen) == (HELLO, [(5, 5)])
        assert os.stat(blobs.path(HELLO)).st_nlink == 1
    assert names(blobs) == [blobs.path(HELLO).name]


@pytest.mark.parametrize("link", [False, True])
def test_an_import_that_is_stopped_keeps_nothing(blobs: Blobs, tmp_path: Path, link: bool) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"hello")

    def stop(done: int, total: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        blobs.import_file(path, link=link, on_bytes=stop)
    assert names(blobs) == []


@pytest.mark.parametrize("link", [False, True])
def test_a_file_that_changes_during_the_import_is_refused(blobs: Blobs, tmp_path: Path, link: bool) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"hello")

    def interfere(done: int, total: int) -> None:
        path.write_bytes(b"other text")

    with pytest.raises(FileFormatError, match="changed while it was read"):
        blobs.import_file(path, link=link, on_bytes=interfere)
    assert names(blobs) == []


def test_pipes_and_folders_are_not_imported(blobs: Blobs, tmp_path: Path) -> None:
    """A named pipe must not be waited for."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises((FileFormatError, NotFound)):
            blobs.import_file(path)
    with pytest.raises(NotFound):
        blobs.import_file(tmp_path / "missing")


def test_reading_is_limited(blobs: Blobs) -> None:
    blobs.add(b"hello")
    with pytest.raises(FileFormatError, match="larger than 4 bytes"):
        blobs.read(HELLO, 4)
    with pytest.raises(NotFound):
        blobs.read("sha256:" + "0" * 64, 4)
