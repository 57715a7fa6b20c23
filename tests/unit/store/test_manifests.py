from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from puna.errors import FileFormatError, InvalidName, NotFound, StoreError
from puna.store.disk.manifests import CONFIG_TYPE, LAYER_PREFIX, MANIFEST_TYPE, Layer, Manifest, Manifests, decode
from puna.store.names import Name

DIGEST = "sha256:" + "a" * 64
MANIFEST = Manifest(2, MANIFEST_TYPE, Layer(CONFIG_TYPE, DIGEST, 3), [Layer(LAYER_PREFIX + "model", DIGEST, 4)])


@pytest.fixture
def manifests(tmp_path: Path) -> Manifests:
    return Manifests(tmp_path / "manifests")


def put(manifests: Manifests, path: str, content: bytes) -> None:
    target = manifests.folder / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)


def test_layout_and_bytes_are_ollamas(manifests: Manifests) -> None:
    manifests.write(Name.parse("me/x:1b"), MANIFEST)
    content = (manifests.folder / "registry.ollama.ai" / "me" / "x" / "1b").read_bytes()
    assert content == (
        b'{"schemaVersion":2,"mediaType":"application/vnd.docker.distribution.manifest.v2+json",'
        b'"config":{"mediaType":"application/vnd.docker.container.image.v1+json","digest":"' + DIGEST.encode() + b'","size":3},'
        b'"layers":[{"mediaType":"application/vnd.ollama.image.model","digest":"' + DIGEST.encode() + b'","size":4}]}\n'
    )
    stored = manifests.read(Name.parse("me/x:1b"))
    assert stored.manifest == MANIFEST
    assert stored.digest == hashlib.sha256(content).hexdigest()


def test_exact_bytes_are_kept(manifests: Manifests) -> None:
    """The digest of a model is that of its manifest's bytes, so white space counts."""
    content = json.dumps(json.loads(MANIFEST.encoded()), indent=3).encode()
    manifests.write_bytes(Name.parse("x"), content)
    assert manifests.read(Name.parse("x")).digest == hashlib.sha256(content).hexdigest()


def test_existing_names_are_found_in_any_case(manifests: Manifests) -> None:
    stored = Name.parse("Me/Model:Tag")
    manifests.write(stored, MANIFEST)
    assert manifests.find(Name.parse("me/mODEL:tAG")) == stored
    assert manifests.find(Name.parse("me/model")) == Name.parse("me/model")


def test_removing_leaves_no_empty_folders(manifests: Manifests) -> None:
    manifests.write(Name.parse("a:1"), MANIFEST)
    manifests.write(Name.parse("a:2"), MANIFEST)
    manifests.remove(Name.parse("a:1"))
    assert [name.display for name in manifests.names()] == ["a:2"]
    manifests.remove(Name.parse("a:2"))
    assert os.listdir(manifests.folder) == []


def changed(**fields: Any) -> bytes:
    return json.dumps({**json.loads(MANIFEST.encoded()), **fields}).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b"[" * 100_000,
        changed(config=None),
        changed(layers=[{"digest": DIGEST, "size": 1}]),
        changed(layers=[{"mediaType": "x", "digest": DIGEST, "size": -1}]),
        changed(layers=[{"mediaType": "x", "digest": DIGEST, "size": 1 << 70}]),
        changed(layers=[{"mediaType": "x", "digest": DIGEST, "size": "1"}]),
        changed(layers=[{"mediaType": "x", "digest": "sha256:../../../../../etc/passwd", "size": 1}]),
        changed(layers=[{"mediaType": "x", "digest": "/etc/passwd", "size": 1}]),
        changed(layers=[{"mediaType": "x", "digest": "", "size": 1}]),
        changed(config={"mediaType": "x", "digest": "sha256-" + "a" * 64, "size": 1}),
    ],
)
def test_damaged_manifests_are_refused_and_skipped(
    manifests: Manifests, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(FileFormatError, match="not a manifest"):
        decode(content)
    put(manifests, "registry.ollama.ai/library/bad/latest", content)
    manifests.write(Name.parse("good"), MANIFEST)
    with caplog.at_level(logging.WARNING):
        found, problems = manifests.all()
    assert [item.name.display for item in found] == ["good:latest"]
    assert [type(problem) for problem in problems] == [FileFormatError]
    with pytest.raises(StoreError, match="bad/latest is damaged"):
        manifests.used()
    assert "bad:latest" in caplog.text


def test_layers_may_be_absent_and_unknown_fields_present() -> None:
    assert decode(changed(layers=None, annotations={"a": "b"})).layers == []


def test_files_with_invalid_names_are_skipped(manifests: Manifests, caplog: pytest.LogCaptureFixture) -> None:
    for path in ("host/ns/model/-bad", "host/n.s/model/tag", "host/ns/model/.unfinished"):
        put(manifests, path, MANIFEST.encoded())
    put(manifests, "stray", b"")
    put(manifests, "host/ns/stray", b"")
    with caplog.at_level(logging.WARNING):
        assert list(manifests.names()) == []
    assert "-bad" in caplog.text
    assert ".unfinished" not in caplog.text


def test_a_name_too_long_for_the_file_system(manifests: Manifests) -> None:
    name = Name.parse("h" * 350 + "/n/m")
    assert manifests.find(name) == name
    with pytest.raises(NotFound):
        manifests.read(name)
    with pytest.raises(InvalidName):
        manifests.write(name, MANIFEST)


def test_a_pipe_in_place_of_a_manifest_is_not_waited_for(manifests: Manifests) -> None:
    folder = manifests.folder / "h" / "n" / "m"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "t")
    assert list(manifests.names()) == []
    with pytest.raises(FileFormatError):
        manifests.read(Name.parse("h/n/m:t"))


def test_a_huge_manifest_is_not_read(manifests: Manifests) -> None:
    put(manifests, "h/n/m/t", b" " * (5 << 20))
    with pytest.raises(FileFormatError, match="larger than"):
        manifests.read(Name.parse("h/n/m:t"))
