from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from puna.errors import BadRequest, DiskFull, FileFormatError, InvalidName, NotFound, PunaError, SourceError, UnsupportedModel
from puna.store.models import modelfile
from puna.store.models.show import show
from puna.store.progress import Progress
from puna.store.recipe import Recipe
from puna.store.store import Store
from tests.lora import write_lora
from tests.splitting import split
from tests.tiny import write_llama
from tests.unit.store.gguf_files import write_model

ZEROS = "sha256:" + "0" * 64


def test_from_a_file(store: Store, model_digest: str) -> None:
    seen: list[Progress] = []
    model = store.create("new", Recipe(files={"model.gguf": model_digest}, system="Hi."), seen.append)
    assert model.model_path == store.blobs.path(model_digest)
    assert model.system == "Hi."
    assert model.details == {
        "parent_model": "",
        "format": "gguf",
        "family": "llama",
        "families": ["llama"],
        "parameter_size": "128",
        "quantization_level": "F16",
    }
    statuses = [progress.status for progress in seen]
    assert statuses[0] == "parsing GGUF"
    assert statuses[1] == f"using existing layer {model_digest}"
    assert statuses[2].startswith("creating new layer sha256:")
    assert statuses[-2:] == ["writing manifest", "success"]
    config = json.loads(store.blobs.read(model.manifest.config.digest, 10_000))  # type: ignore[union-attr]
    assert config["architecture"] == "amd64"
    assert config["os"] == "linux"
    assert config["rootfs"]["diff_ids"][0] == model_digest


def test_from_a_model(store: Store, base: str) -> None:
    """Parameters merge key by key, licences add up, the rest replaces."""
    store.create("mid", Recipe(base=base, licenses=("MIT",), system="one", messages=({"role": "user", "content": "a"},)))
    model = store.create(
        "child",
        Recipe(
            base="MID",
            parameters={"stop": ["z"], "top_k": 3},
            licenses=("Apache",),
            system="two",
            template="{{ .Prompt }}",
            renderer="qwen3-coder",
            parser="qwen3",
            requires="v0.9.0",
        ),
    )
    assert model.parent == "mid:latest"
    assert model.parameters == {"temperature": 0.5, "stop": ["z"], "top_k": 3}
    assert model.licenses == ("MIT", "Apache")
    assert model.system == "two"
    assert model.template == "{{ .Prompt }}"
    assert model.messages == ({"role": "user", "content": "a"},)
    assert (model.config.renderer, model.config.parser, model.config.requires) == ("qwen3-coder", "qwen3", "0.9.0")
    grandchild = store.create("grandchild", Recipe(base="child", messages=({"role": "user", "content": "b"},)))
    assert grandchild.config.renderer == "qwen3-coder"
    assert grandchild.messages == ({"role": "user", "content": "b"},)
    assert grandchild.system == "two"


@pytest.mark.parametrize("kind", ["renderer", "parser"])
def test_renderers_and_parsers_that_are_not_known_are_refused(store: Store, base: str, kind: str) -> None:
    with pytest.raises(BadRequest, match=f'unknown {kind} "nobody"; there are .*qwen3-coder'):
        store.create("child", Recipe(base=base, **{kind: "nobody"}))  # type: ignore[arg-type]


def test_fields_of_other_programs_survive(store: Store, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = store.get(base)
    assert model.manifest is not None
    path = store.blobs.path(model.manifest.config.digest)
    path.write_text(json.dumps({**json.loads(path.read_text()), "future": {"a": 1}}))
    child = Store(store.root).create("child", Recipe(base=base, system="x"))
    assert child.config_extra == {"future": {"a": 1}}


def test_replacing_a_model_keeps_its_case(store: Store, base: str) -> None:
    store.create("Fine:V1", Recipe(base=base, system="one"))
    first = store.get("fine:v1")
    model = store.create("FINE:v1", Recipe(base=base, system="two"))
    assert model.name == "Fine:V1"
    assert model.digest != first.digest
    system = next(layer for layer in first.manifest.layers if layer.kind == "system")  # type: ignore[union-attr]
    assert not store.blobs.has(system.digest)


def test_projectors_and_adapters(store: Store, tmp_path: Path, model_digest: str) -> None:
    projector = store.blobs.import_file(write_model(tmp_path / "p.gguf", architecture="clip")).digest
    files = [
        write_lora(tmp_path / f"{seed}.gguf", store.blobs.path(model_digest), ["token_embd.weight"], seed=seed) for seed in (1, 2)
    ]
    adapter, other = (store.blobs.import_file(path).digest for path in files)
    model = store.create("m", Recipe(files={"model.gguf": model_digest, "mmproj.gguf": projector}, adapters={"a.gguf": adapter}))
    assert model.projector_paths == (store.blobs.path(projector),)
    assert model.families == [model.family, "clip"]
    assert model.adapter_paths == (store.blobs.path(adapter),)
    assert model.capabilities == ["completion", "vision"]
    assert model.family == "llama"
    assert len(store.create("n", Recipe(base="m", adapters={"b.gguf": adapter})).adapter_paths) == 1
    two = store.create("two", Recipe(base="m", adapters={"a.gguf": other, "b.gguf": adapter}))
    assert two.adapter_paths == (store.blobs.path(other), store.blobs.path(adapter))
    together = store.create("t", Recipe(files={"a.gguf": other, "model.gguf": model_digest, "b.gguf": adapter}))
    assert together.adapter_paths == two.adapter_paths
    store.blobs.remove(other)
    with pytest.raises(NotFound, match="its adapters are missing from the store"):
        store.get("two")
    foreign = store.blobs.import_file(
        write_lora(
            tmp_path / "f.gguf", store.blobs.path(model_digest), ["token_embd.weight"], keys={"general.architecture": "gemma2"}
        )
    ).digest
    with pytest.raises(FileFormatError, match=r"adapter a\.gguf: it was made for a model of architecture 'gemma2'"):
        store.create("x", Recipe(base="m", adapters={"a.gguf": foreign}))
    with pytest.raises(BadRequest, match="not of an adapter"):
        store.create("x", Recipe(files={"model.gguf": model_digest}, adapters={"a.gguf": model_digest}))
    with pytest.raises(BadRequest, match="hold no model"):
        store.create("x", Recipe(files={"p.gguf": projector}))


def test_info_overrides(store: Store, base: str) -> None:
    info = {"model_family": "mine", "parameter_size": "9B", "context_length": 77.0, "capabilities": ["tools"], "other": 1}
    model = store.create("m", Recipe(base=base, info=info))
    assert model.family == "mine"
    assert model.parameter_size == "9B"
    assert model.context_length == 77
    assert model.capabilities == ["completion", "tools"]


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({}, BadRequest, "neither 'from' or 'files' was specified"),
        ({"files": {}}, BadRequest, "unknown type"),
        ({"files": {"/etc/x.gguf": ZEROS}}, BadRequest, "file path must be relative"),
        ({"files": {"../x.gguf": ZEROS}}, BadRequest, "file path must be relative"),
        ({"files": {"a/../../x.gguf": ZEROS}}, BadRequest, "file path must be relative"),
        ({"files": {"a//x.gguf": ZEROS}}, BadRequest, "file path must be relative"),
        ({"files": {"C:x.gguf": ZEROS}}, BadRequest, "file path must be relative"),
        ({"files": {"a\\..\\x.gguf": ZEROS}}, BadRequest, "file path must be relative"),
        ({"files": {"x\0.gguf": ZEROS}}, BadRequest, "file path must be relative"),
        ({"files": {"": ZEROS}}, BadRequest, "file path must be relative"),
        ({"files": {"x.gguf": ""}}, BadRequest, "invalid digest format"),
        ({"files": {"x.gguf": "sha256:../../x"}}, BadRequest, "invalid digest format"),
        ({"files": {"x.gguf": ZEROS}}, BadRequest, "not found, upload it first"),
        ({"files": {"x.safetensors": ZEROS}}, BadRequest, "not found, upload it first"),
        ({"base": "base", "adapters": {"a.gguf": ZEROS}}, BadRequest, "not found, upload it first"),
        ({"base": "base", "adapters": {"a.safetensors": ZEROS}}, BadRequest, "not found, upload it first"),
        (
            {"base": "base", "quantize": "q9"},
            PunaError,
            "unsupported quantization type Q9 - supported types are F32, F16, .*Q4_K_M",
        ),
        ({"base": "base", "messages": ({"role": "robot"},)}, BadRequest, "message role must be one of"),
        ({"base": "base", "requires": "soon"}, BadRequest, "semver"),
        ({"base": "base", "parameters": {"num_ctx": "x"}}, PunaError, 'option "num_ctx" must be of type integer'),
        ({"base": "base", "info": {"base_name": 1}}, BadRequest, 'info field "base_name" must be a string'),
        ({"base": "base", "info": {"context_length": "x"}}, BadRequest, 'info field "context_length" must be a number'),
        ({"base": "base", "info": {"context_length": -1}}, BadRequest, "must be a non-negative integer"),
        ({"base": "../x"}, InvalidName, "invalid model name"),
        ({"base": "nowhere"}, SourceError, "pull model manifest: registry.ollama.ai cannot be reached"),
    ],
)
def test_refusals(store: Store, base: str, fields: dict[str, Any], error: type[PunaError], message: str) -> None:
    with pytest.raises(error, match=message):
        store.create("new", Recipe(**fields))
    assert [model.name for model in store.list()] == ["base:latest"]


def test_files_that_are_no_models(store: Store, tmp_path: Path) -> None:
    text = store.blobs.add(b"hello, this is text").digest
    head = store.blobs.add(b"GGUF").digest
    split = store.blobs.import_file(write_model(tmp_path / "s.gguf", split__count=3)).digest
    for files, error, message in [
        ({"x.gguf": text}, BadRequest, "supplied file was not in GGUF format"),
        ({"x.bin": text}, BadRequest, "unknown type"),
        ({"x.gguf": head}, FileFormatError, "the file ends inside the version"),
        ({"x.gguf": split}, FileFormatError, "cut into 3 files, and not all are there: 2, 3 missing"),
    ]:
        with pytest.raises(error, match=message):
            store.create("new", Recipe(files=files))
    assert store.list() == []


def test_a_quantised_base_cannot_be_quantised(store: Store, tmp_path: Path) -> None:
    digest = store.blobs.import_file(write_model(tmp_path / "q.gguf", file_type=15)).digest
    store.create("q", Recipe(files={"q.gguf": digest}))
    with pytest.raises(PunaError, match="quantization is only supported for F16, BF16 and F32 models"):
        store.create("new", Recipe(base="q", quantize="Q8_0"))


def test_the_modelfile_of_show_makes_the_same_model(store: Store, base: str) -> None:
    first = store.create(
        "first",
        Recipe(
            base=base,
            system=' "quoted"\nlines ',
            template='{{ if .System }}"""{{ end }}\n{{ .Prompt }}',
            licenses=("a\nb", "c"),
            messages=({"role": "user", "content": "hi there"}, {"role": "assistant", "content": 'I said "hi"'}),
            parser="qwen3",
        ),
    )
    reply = show(first)
    assert "# FROM first:latest" in reply.modelfile
    parsed = modelfile.parse(reply.modelfile)
    assert parsed.values("from") == [str(first.model_path)]
    digest = store.blobs.import_file(Path(parsed.last("from"))).digest
    second = store.create(
        "second",
        Recipe(
            files={"x.gguf": digest},
            template=parsed.last("template"),
            system=parsed.last("system"),
            licenses=tuple(parsed.values("license")),
            parameters=parsed.parameters,
            messages=tuple(parsed.messages),
            parser=parsed.last("parser"),
        ),
    )
    for part in ("template", "system", "licenses", "parameters", "messages", "model_path"):
        assert getattr(second, part) == getattr(first, part)
    assert second.config == first.config


def test_a_model_in_parts_becomes_one_file(store: Store, tmp_path: Path) -> None:
    whole = Path(write_llama(tmp_path / "tiny.gguf", n_ctx=256))
    parts = split(whole, 3, tmp_path / "parts")
    digests = {path.name: store.blobs.import_file(path).digest for path in parts}
    projector = store.blobs.import_file(write_model(tmp_path / "p.gguf", architecture="clip")).digest
    seen: list[Progress] = []
    model = store.create("m", Recipe(files={**digests, "mmproj.gguf": projector}), seen.append)
    assert model.model_path.read_bytes() == whole.read_bytes()
    assert model.projector_paths == (store.blobs.path(projector),)
    assert "joining the parts of the model" in [progress.status for progress in seen]
    assert model.family == "llama"
    assert not [path for path in store.root.rglob("*") if path.name.startswith(("tmp", "join"))]
    with pytest.raises(UnsupportedModel, match="is one of 3 files of a model: `puna create` with FROM makes one of them"):
        store.from_file(parts[0])
    other = store.blobs.import_file(write_model(tmp_path / "o.gguf", seed=9)).digest
    assert store.create("d", Recipe(files={"o.gguf": other}, drafts=digests)).draft_path == model.weights_path


def test_the_room_for_the_whole_is_looked_at_first(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = split(Path(write_llama(tmp_path / "tiny.gguf", n_ctx=256)), 3, tmp_path / "parts")
    digests = {path.name: store.blobs.import_file(path).digest for path in parts}
    monkeypatch.setattr("puna.store.disk.space._free", lambda _: 1000)
    with pytest.raises(DiskFull, match=r"more bytes are needed \([0-9]+ wanted, 1000 free\)"):
        store.create("m", Recipe(files=digests))
    assert store.find("m") is None
