"""A Modelfile that ``show`` prints makes the same model again, whatever is in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from puna.cli import create_request
from puna.errors import BadRequest
from puna.store.models import modelfile
from puna.store.models.model import StoredModel
from puna.store.models.show import modelfile_text, show
from puna.store.recipe import Recipe
from puna.store.store import Store
from tests.lora import write_lora
from tests.unit.store.gguf_files import write_model

TEXT = st.text(st.sampled_from("ab #\"\n\r\t ü.{}\\'/-\u200d語🙂"), max_size=40)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0, 2, allow_nan=False),
        "top_k": st.integers(-5, 10**6),
        "num_ctx": st.integers(4, 10**6),
        "use_mmap": st.booleans(),
        "stop": st.lists(TEXT.filter(bool), min_size=1, max_size=3),
        "logit_bias": st.dictionaries(st.integers(0, 1000), st.floats(-10, 10, allow_nan=False), min_size=1, max_size=3),
        "samplers": st.permutations(["top_k", "top_p", "temperature"]).map(list),
        "mirostat_eta": st.sampled_from([1e-05, 0.1, 0.123456789125]),
    },
)
MESSAGES = st.lists(st.fixed_dictionaries({"role": st.sampled_from(modelfile.ROLES), "content": TEXT.filter(bool)}), max_size=3)
RECIPES: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict,
    template=st.just("") | TEXT.map(lambda text: text.replace("{", "[").replace("}", "]")),
    system=TEXT,
    licenses=st.lists(TEXT.filter(bool), max_size=3).map(tuple),
    parameters=OPTIONS,
    messages=MESSAGES.map(tuple),
    renderer=st.sampled_from(["", "qwen3-coder"]),
    parser=st.sampled_from(["", "qwen3"]),
    requires=st.sampled_from(["", "0.14.0", "v1.2.3-rc.1"]),
)


def recreated(store: Store, name: str, text: str) -> StoredModel:
    """What ``puna create`` makes of a Modelfile whose files are blobs of the same store."""
    request, files, adapters, drafts = create_request.build(name, modelfile.parse(text), Path("/"))
    digests = {
        field: {name: path.name.replace("-", ":") for name, path in paths.items()}
        for field, paths in (("files", files), ("adapters", adapters), ("drafts", drafts))
    }
    recipe = Recipe(
        base=request.get("from", ""),
        files=digests["files"] or None,
        adapters=digests["adapters"],
        drafts=digests["drafts"],
        template=request.get("template", ""),
        system=request.get("system", ""),
        licenses=tuple(request.get("license", ())),
        parameters=request.get("parameters", {}),
        messages=tuple(request.get("messages", ())),
        renderer=request.get("renderer", ""),
        parser=request.get("parser", ""),
        requires=request.get("requires", ""),
    )
    return store.create(name, recipe)


def essence(model: StoredModel) -> dict[str, Any]:
    """All that ``show`` can show of a model, but for its name and when it was made."""
    seen = msgspec.to_builtins(show(model, verbose=True).model_dump(mode="json"))
    del seen["modified_at"], seen["modelfile"], seen["details"]["parent_model"]
    paths = (model.weights_path, model.projector_paths, model.adapter_paths, model.draft_path)
    return {**seen, "files": paths, "config": (model.config.renderer, model.config.parser), "options": model.parameters}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("round")
    store = Store(folder / "models")
    digest = store.blobs.import_file(write_model(folder / "m.gguf")).digest
    store.create("base", Recipe(files={"m.gguf": digest}))
    return store


@given(fields=RECIPES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_show_recreates_the_model(shared: Store, fields: dict[str, Any]) -> None:
    """By the paths of its files where a Modelfile can say it all; by its name, in any case."""
    model = shared.create("one", Recipe(base="base", **fields))
    text = modelfile_text(model)
    by_name = recreated(shared, "two", f"FROM {model.name}\n")
    assert essence(by_name) == essence(model)
    if "# Not all of this model" in text:
        assert is_beyond_words(fields)
        return
    assert essence(recreated(shared, "three", text)) == essence(model)


def is_beyond_words(fields: dict[str, Any]) -> bool:
    texts = [fields["template"], fields["system"], *fields["licenses"], *(m["content"] for m in fields["messages"])]
    texts += [*fields["parameters"].get("stop", ())]
    return any('"""' in text or ('"' in text and "\n" in text.replace("\r", "\n")) or "\u200d" in text for text in texts)


def test_every_instruction_is_kept(shared: Store, tmp_path: Path) -> None:
    weights = write_model(tmp_path / "w.gguf", seed=3)
    draft = write_model(tmp_path / "d.gguf", seed=4)
    lora = [write_lora(tmp_path / f"{seed}.gguf", weights, ["token_embd.weight"], seed=seed) for seed in (1, 2)]
    written = f"""FROM {weights}
ADAPTER {lora[0]}
ADAPTER {lora[1]}
DRAFT {draft}
TEMPLATE {{{{ .Prompt }}}}
SYSTEM be kind
RENDERER qwen3-coder
PARSER qwen3
REQUIRES 0.14.0
PARAMETER stop a
PARAMETER stop b
PARAMETER temperature 0.5
LICENSE MIT
LICENSE Apache
MESSAGE user hi
MESSAGE assistant hello
"""
    blobs = {path: shared.blobs.import_file(path).digest for path in (weights, draft, *lora)}
    text = written
    for path, digest in blobs.items():
        text = text.replace(str(path), str(shared.blobs.path(digest)))
    model = recreated(shared, "all", text)
    assert model.draft_path == shared.blobs.path(blobs[draft])
    shown = [line for line in modelfile_text(model).splitlines() if line and not line.startswith("#")]
    assert shown == text.splitlines()
    assert essence(recreated(shared, "again", modelfile_text(model))) == essence(model)
    child = recreated(shared, "child", "FROM all\nSYSTEM be brief\n")
    assert child.draft_path == model.draft_path
    assert child.manifest is not None
    assert [layer.kind for layer in child.manifest.layers].count("draft") == 1


def test_what_no_modelfile_can_say_is_told_in_it(shared: Store) -> None:
    model = shared.create("hard", Recipe(base="base", system='a line that ends in """\nand goes on'))
    text = modelfile_text(model)
    assert "# Not all of this model can be written in a Modelfile: SYSTEM. FROM hard:latest keeps it." in text.splitlines()
    assert modelfile.parse(text)
    odd = shared.create("odd", Recipe(base="base", messages=({"role": "tool", "content": "12"},)))
    assert "in a Modelfile: MESSAGE." in modelfile_text(odd)
    assert "# Not all" not in modelfile_text(shared.get("base"))


@pytest.mark.parametrize(
    ("what", "refusal"),
    [
        ("adapter", r"d\.gguf is no DRAFT"),
        ("projector", r"d\.gguf is no DRAFT"),
        ("same", "DRAFT must be another model than FROM"),
        ("text", "supplied file was not in GGUF format"),
    ],
)
def test_a_draft_is_another_model(shared: Store, tmp_path: Path, what: str, refusal: str) -> None:
    weights = shared.get("base").model_path
    path = {
        "adapter": lambda: write_lora(tmp_path / "a.gguf", weights, ["token_embd.weight"]),
        "projector": lambda: write_model(tmp_path / "p.gguf", architecture="clip"),
        "same": lambda: weights,
        "text": lambda: Path(__file__),
    }[what]()
    digest = shared.blobs.import_file(path).digest
    with pytest.raises(BadRequest, match=refusal):
        shared.create("new", Recipe(base="base", drafts={"d.gguf": digest}))
    assert shared.find("new") is None
