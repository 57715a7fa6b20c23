"""One folder for Puna and Ollama: what either wrote, the other lists, pulls into and tidies up."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import lock_descriptor

from puna.store.recipe import Recipe
from puna.store.sources.elsewhere import Elsewhere
from puna.store.store import Store
from tests.laid_out import DAYS, blob, model
from tests.registries import Registry
from tests.unit.store.gguf_files import write_model

LIBRARY = "registry.ollama.ai/library"


@pytest.fixture
def weights(tmp_path: Path) -> list[bytes]:
    return [write_model(tmp_path / f"{seed}.gguf", seed=seed).read_bytes() for seed in range(3)]


@pytest.fixture
def root(tmp_path: Path, weights: list[bytes]) -> Path:
    """Two models that share weights and a text, one of another host, and what a pull has left behind."""
    root = tmp_path / "ollama"
    params = '{"stop":["<|end|>"],"temperature":0.5}'
    model(root, f"{LIBRARY}/llama3.2/latest", weights[0], age_s=9 * DAYS, template="{{ .Prompt }}", params=params, license="MIT")
    model(root, f"{LIBRARY}/llama3.2/1b", weights[0], age_s=9 * DAYS, template="{{ .Prompt }}", system="be kind")
    model(root, "hf.co/ann/Tiny-GGUF/Q4_K_M", weights[1], age_s=9 * DAYS)
    return root


@pytest.fixture
def store(root: Path, tmp_path: Path) -> Store:
    return Store(root, elsewhere=Elsewhere(key_path=tmp_path / "key"))


@pytest.fixture
def registry() -> Iterator[Registry]:
    with Registry().running() as running:
        yield running


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file() and path.name != ".lock"}


def test_its_models_are_listed_and_opened(store: Store, root: Path, weights: list[bytes]) -> None:
    before = files(root)
    assert {item.name for item in store.list()} == {"llama3.2:latest", "llama3.2:1b", "hf.co/ann/Tiny-GGUF:Q4_K_M"}
    found = store.get("LLAMA3.2")
    manifest = root / "manifests" / LIBRARY / "llama3.2" / "latest"
    assert found.digest == hashlib.sha256(manifest.read_bytes()).hexdigest()
    assert found.model_path.read_bytes() == weights[0]
    assert found.parameters == {"stop": ["<|end|>"], "temperature": 0.5}
    assert (found.template, found.licenses, store.get("llama3.2:1b").system) == ("{{ .Prompt }}", ("MIT",), "be kind")
    assert found.details["parameter_size"] == "1.2B"
    assert files(root) == before


def test_a_pull_into_it_shares_what_is_there(
    store: Store, root: Path, weights: list[bytes], registry: Registry, tmp_path: Path
) -> None:
    there = Store(tmp_path / "there")
    digest = there.blobs.add(weights[0]).digest
    there.create("m", Recipe(files={"m.gguf": digest}, system="new"))
    manifest = registry.add(there, "m", "library/m:latest")
    before = files(root)
    store.pull(f"{registry.netloc}/library/m", insecure=True)
    assert registry.n_bytes_sent < len(weights[0]), "the weights were here already"
    after = files(root)
    assert before.items() <= after.items()
    assert after[f"manifests/{registry.netloc}/library/m/latest"] == manifest
    for name in after.keys() - before.keys():
        assert re.fullmatch(r"blobs/sha256-[0-9a-f]{64}|manifests/[^/]+/library/m/latest", name), name
        if name.startswith("blobs/"):
            assert hashlib.sha256(after[name]).hexdigest() == name.removeprefix("blobs/sha256-")


def test_pruning_leaves_what_a_model_of_either_needs(store: Store, root: Path, weights: list[bytes]) -> None:
    needed = files(root)
    old = blob(root, b"nobody's, old", age_s=2 * 3600)
    young = blob(root, b"nobody's, but young")
    legacy = root / "blobs" / "sha256-x"
    named = hashlib.sha256(weights[2]).hexdigest()
    (root / "blobs" / f"sha256:{named}").write_bytes(weights[2])
    os.utime(root / "blobs" / f"sha256:{named}", (time.time(),) * 2)
    partial = root / "blobs" / f"sha256-{'a' * 64}-partial"
    partial.write_bytes(b"half")
    (root / "blobs" / f"{partial.name}-0").write_text('{"N":0,"Offset":0,"Size":4,"Completed":2}')
    for path in (partial, partial.with_name(f"{partial.name}-0")):
        os.utime(path, (time.time() - 2 * DAYS,) * 2)
    store.prune()
    after = files(root)
    assert needed.items() <= after.items()
    assert {name.removeprefix("blobs/") for name in after.keys() - needed.keys()} == {
        young.replace(":", "-"),
        f"sha256-{named}",  # by its new name
    }
    assert not (root / "blobs" / old.replace(":", "-")).exists()
    assert not legacy.exists()


def test_deleting_one_of_its_models_leaves_what_others_use(store: Store, root: Path, weights: list[bytes]) -> None:
    shared = store.get("llama3.2").model_path
    store.delete("llama3.2")
    assert store.get("llama3.2:1b").model_path == shared
    assert shared.read_bytes() == weights[0]
    assert not (root / "manifests" / LIBRARY / "llama3.2" / "latest").exists()
    store.delete("llama3.2:1b")
    assert not shared.exists()
    assert not (root / "manifests" / LIBRARY).exists()
    assert [item.name for item in store.list()] == ["hf.co/ann/Tiny-GGUF:Q4_K_M"]


def test_what_is_written_is_as_ollama_would_write_it(store: Store, root: Path) -> None:
    store.create("mine", Recipe(base="llama3.2", system="be brief", messages=({"role": "user", "content": "hi"},)))
    path = root / "manifests" / LIBRARY / "mine" / "latest"
    manifest = json.loads(path.read_text())
    assert list(manifest) == ["schemaVersion", "mediaType", "config", "layers"]
    assert manifest["schemaVersion"] == 2
    assert manifest["mediaType"] == "application/vnd.docker.distribution.manifest.v2+json"
    assert manifest["config"]["mediaType"] == "application/vnd.docker.container.image.v1+json"
    kinds = [layer["mediaType"].removeprefix("application/vnd.ollama.image.") for layer in manifest["layers"]]
    assert sorted(kinds) == ["license", "messages", "model", "params", "system", "template"]
    assert next(layer for layer in manifest["layers"] if layer["mediaType"].endswith("model"))["from"] == "llama3.2:latest"
    for layer in [manifest["config"], *manifest["layers"]]:
        content = (root / "blobs" / layer["digest"].replace(":", "-")).read_bytes()
        assert (f"sha256:{hashlib.sha256(content).hexdigest()}", len(content)) == (layer["digest"], layer["size"])
    config = json.loads((root / "blobs" / manifest["config"]["digest"].replace(":", "-")).read_bytes())
    assert {"model_format", "model_family", "model_type", "file_type", "architecture", "os", "rootfs"} <= config.keys()
    others = [name for name in files(root) if not re.fullmatch(r"manifests(/[^/]+){4}|blobs/sha256-[0-9a-f]{64}", name)]
    assert others == []


def test_the_unfinished_second_copy_of_a_blob_goes_when_nobody_works_on_it(store: Store, root: Path) -> None:
    """Although a model needs that blob: it is here whole."""
    weights = store.get("llama3.2").model_path
    left = weights.with_name(f"{weights.name}-partial")
    for held in (True, False):
        left.write_bytes(b"half")
        os.utime(left, (time.time() - 2 * DAYS,) * 2)
        descriptor = os.open(left, os.O_RDWR)
        try:
            if held:
                lock_descriptor(descriptor, blocking=False)
            store.prune()
            assert left.exists() == held
        finally:
            os.close(descriptor)
    assert weights.exists()
