from __future__ import annotations

import warnings
import zipfile
from pathlib import Path

import pytest

from puna.errors import SourceError
from puna.store.sources import wheel
from puna.store.sources.wheel import WheelFile
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
    path = write_wheel(tmp_path, {MEMBER: GGUF}, metadata={"LICENSE": b"x" * (wheel.MAX_TEXT_BYTES + 1)})
    with WheelFile(path) as file, pytest.raises(SourceError, match="larger than"):
        _ = file.licenses
