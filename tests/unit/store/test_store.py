from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from puna.errors import BadRequest, FileFormatError, InvalidName, NotFound, UnsupportedModel
from puna.store.disk.manifests import LAYER_PREFIX
from puna.store.names import Name
from puna.store.recipe import Recipe
from puna.store.store import Store
from tests.unit.store.gguf_files import JINJA, write_model


def blob_names(store: Store) -> set[str]:
    return set(os.listdir(store.blobs.folder))


def test_an_ollama_store_is_read_unchanged(store: Store, tmp_path: Path) -> None:
    """Files written here by hand as Ollama writes them: legacy template layer, compact JSON, unknown layers and fields."""
    layers = []

    def layer(kind: str, content: bytes) -> dict[str, object]:
        digest = hashlib.sha256(content).hexdigest()
        store.blobs.folder.mkdir(parents=True, exist_ok=True)
        (store.blobs.folder / f"sha256-{digest}").write_bytes(content)
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(content)}

    weights = write_model(tmp_path / "x.gguf", tokenizer__chat_template=JINJA).read_bytes()
    layers.append({**layer(LAYER_PREFIX + "model", weights), "from": "base:latest"})
    layers.append(layer(LAYER_PREFIX + "prompt", b"{{ .Prompt }}"))
    layers.append(layer(LAYER_PREFIX + "system", b"Be kind."))
    layers.append(layer(LAYER_PREFIX + "params", b'{"stop":["</s>"],"temperature":0.1}\n'))
    layers.append(layer(LAYER_PREFIX + "messages", b'[{"role":"user","content":"hi"}]\n'))
    layers.append(layer(LAYER_PREFIX + "license", b"MIT"))
    layers.append(layer(LAYER_PREFIX + "license", b"more"))
    layers.append(layer(LAYER_PREFIX + "embed", b"obsolete"))
    config: dict[str, object] = {"model_format": "gguf", "model_family": "llama", "model_families": None}
    config |= {"model_type": "8.0B", "file_type": "Q4_0"}
    config |= {"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": ["sha256:0"]}, "future": 1}
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
        "config": layer("application/vnd.docker.container.image.v1+json", json.dumps(config).encode()),
        "layers": layers,
    }
    path = store.root / "manifests" / "registry.ollama.ai" / "library" / "Llama3" / "8B"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(manifest))

    model = store.get("llama3:8b")
    assert model.name == "Llama3:8B"
    assert model.model_path.read_bytes() == weights
    assert model.parent == "base:latest"
    assert model.template == "{{ .Prompt }}"
    assert model.chat_template == JINJA
    assert model.system == "Be kind."
    assert model.parameters == {"stop": ["</s>"], "temperature": 0.1}
    assert model.messages == ({"role": "user", "content": "hi"},)
    assert model.licenses == ("MIT", "more")
    assert (model.family, model.parameter_size, model.quantization_level) == ("llama", "8.0B", "Q4_0")
    assert model.digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert model.n_bytes == sum(int(str(item["size"])) for item in layers) + int(str(manifest["config"]["size"]))  # type: ignore[index]
    assert [listed.name for listed in store.list()] == ["Llama3:8B"]


@pytest.mark.parametrize("name", ["missing", "missing:tag", "pypi:missing"])
def test_unknown_names_are_named_as_typed(store: Store, name: str) -> None:
    with pytest.raises(NotFound, match=f"^model '{name}' not found$"):
        store.get(name)
    with pytest.raises(NotFound, match=f"^model '{name}' not found$"):
        store.delete(name)


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "/etc/passwd", "a\0b", "pypi:", "pypi:--help", "pypi:a b"])
def test_invalid_names(store: Store, name: str) -> None:
    for use in (store.get, store.delete, store.pull):
        with pytest.raises(InvalidName, match=r"^invalid model name"):
            use(name)
    assert not store.root.exists()


def test_the_newest_comes_first(store: Store, base: str, model_digest: str) -> None:
    for index, name in enumerate(["c", "a", "b"]):
        store.create(name, Recipe(files={"x.gguf": model_digest}))
        os.utime(store.manifests.path(Name.parse(name)), (index, index))
    assert [model.name for model in store.list()] == ["base:latest", "b:latest", "a:latest", "c:latest"]


def test_deleting_keeps_what_others_use(store: Store, base: str) -> None:
    store.copy("base", "other")
    before = blob_names(store)
    store.delete("BASE")
    assert blob_names(store) == before
    assert store.get("other").parameters["temperature"] == 0.5
    store.delete("other:latest")
    assert blob_names(store) == set()
    assert os.listdir(store.manifests.folder) == []


def test_deleting_removes_layers_of_its_own(store: Store, base: str) -> None:
    before = blob_names(store)
    store.create("child", Recipe(base="base", system="You are a child."))
    store.delete("child")
    assert blob_names(store) == before


def test_nothing_is_removed_when_told_so(store: Store, base: str) -> None:
    keeping = Store(store.root, keep_unused=True)
    before = blob_names(store)
    keeping.delete("base")
    assert blob_names(store) == before


def test_deleting_a_damaged_model(store: Store, base: str) -> None:
    path = store.root / "manifests" / "registry.ollama.ai" / "library" / "bad" / "latest"
    path.parent.mkdir()
    path.write_text("{")
    store.delete("bad")
    assert not path.exists()
    assert store.get("base")


def test_copies(store: Store, base: str) -> None:
    store.copy("base", "me/Copy:v1")
    assert store.get("me/copy:V1").digest == store.get("base").digest
    store.copy("base", "Base")
    assert [model.name for model in store.list() if "base" in model.name.lower()] == ["base:latest"]


@pytest.mark.parametrize(
    ("source", "destination", "message"),
    [
        ("../x", "y", '^source "../x" is invalid$'),
        ("base", "", '^destination "" is invalid$'),
        ("base", "a/../../x", '^destination "a/../../x" is invalid$'),
    ],
)
def test_copies_with_invalid_names(store: Store, base: str, source: str, destination: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        store.copy(source, destination)


def test_copying_what_is_not_there(store: Store) -> None:
    with pytest.raises(NotFound, match=r'^model "nothing" not found$'):
        store.copy("nothing", "x")


def test_missing_weights_are_said(store: Store, base: str) -> None:
    """The words not found make clients pull again, which is what helps."""
    store.get("base").model_path.unlink()
    with pytest.raises(NotFound, match=r"^model 'base' not found: its weights are missing"):
        store.get("base")


def test_damaged_layers_are_named_and_skipped(store: Store, base: str, caplog: pytest.LogCaptureFixture) -> None:
    store.create("bad", Recipe(base="base", parameters={"top_k": 7}))
    manifest = store.get("bad").manifest
    assert manifest is not None
    params = next(layer for layer in manifest.layers if layer.kind == "params")
    store.blobs.path(params.digest).write_text("[1]")
    fresh = Store(store.root)
    with pytest.raises(FileFormatError, match="bad:latest is damaged: layer sha256:"):
        fresh.get("bad")
    with caplog.at_level(logging.WARNING):
        assert [model.name for model in fresh.list()] == ["base:latest"]
    assert "bad:latest" in caplog.text


def test_stubs_have_no_weights(store: Store, base: str) -> None:
    manifest = store.get("base").manifest
    assert manifest is not None
    layers = [layer for layer in manifest.layers if layer.kind != "model"]
    store.manifests.write(Name.parse("base"), type(manifest)(2, manifest.media_type, manifest.config, layers))
    model = store.get("base")
    assert model.capabilities == []
    with pytest.raises(UnsupportedModel, match="stands for a model on another server"):
        _ = model.model_path


def test_a_bare_file_is_a_model(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "x.gguf", file_type=7)
    monkeypatch.chdir(tmp_path)
    model = store.from_file("x.gguf")
    assert model.name == "x.gguf"
    assert model.model_path == tmp_path / "x.gguf"
    assert model.details["quantization_level"] == "Q8_0"
    assert model.capabilities == ["completion"]
    assert not store.root.exists()


def projector(path: Path, n_text: int = 32, file_type: int = 1) -> Path:
    keys: dict[str, Any] = {"clip__vision__projection_dim": n_text, "clip__vision__block_count": 1}
    return write_model(path, architecture="clip", file_type=file_type, **keys)


def test_a_projector_beside_a_bare_file_is_what_it_sees_with(store: Store, tmp_path: Path) -> None:
    """Of the model's width, in F16 if there is such a one; unless another is named. What is no projector is passed over."""
    alone = store.from_file(write_model(tmp_path / "x.gguf"))
    assert alone.projector_paths == ()
    precise, best = projector(tmp_path / "mmproj-F32.gguf", file_type=0), projector(tmp_path / "x-MMPROJ-f16.gguf")
    projector(tmp_path / "mmproj-a-of-another-width.gguf", n_text=64)
    write_model(tmp_path / "mmproj-that-is-a-model.gguf")
    (tmp_path / "mmproj-broken.gguf").write_text("GGUF, but no more")
    (tmp_path / "mmproj-gone.gguf").symlink_to(tmp_path / "nothing")
    projector(tmp_path / "another.gguf")
    model = store.from_file(tmp_path / "x.gguf")
    assert model.projector_paths == (best,)
    assert model.capabilities == ["completion", "vision"]
    assert store.from_file(tmp_path / "x.gguf", precise).projector_paths == (precise,)
    best.unlink()
    assert store.from_file(tmp_path / "x.gguf").projector_paths == (precise,)


def test_a_bare_file_that_sees_or_embeds_takes_no_projector(store: Store, tmp_path: Path) -> None:
    projector(tmp_path / "mmproj.gguf")
    assert store.from_file(write_model(tmp_path / "sees.gguf", llama__vision__block_count=2)).projector_paths == ()
    assert store.from_file(write_model(tmp_path / "embeds.gguf", llama__pooling_type=1)).projector_paths == ()


def test_bare_files_that_are_no_models(store: Store, tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("hello, this is no model")
    write_model(tmp_path / "adapter.gguf", general__type="adapter")
    os.mkfifo(tmp_path / "pipe.gguf")
    for name in ("text.gguf", "adapter.gguf", "pipe.gguf"):
        with pytest.raises(FileFormatError):
            store.from_file(tmp_path / name)
    with pytest.raises(NotFound):
        store.from_file(tmp_path / "missing.gguf")


def test_many_threads(store: Store, model_digest: str) -> None:
    """Creating and deleting at once never leaves a model whose blobs are gone."""
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(8):
                store.create(f"m{number}", Recipe(files={"x.gguf": model_digest}, system=f"shared {turn % 2}"))
                if turn % 3 == 2:
                    store.delete(f"m{number}")
        except NotFound as error:
            if "in the meantime" not in str(error):
                errors.append(error)
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    store.create("keeper", Recipe(files={"x.gguf": model_digest}))
    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for model in Store(store.root).list():
        assert model.manifest is not None
        assert all(store.blobs.has(layer.digest) for layer in model.manifest.blobs)
