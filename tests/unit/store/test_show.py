from __future__ import annotations

from pathlib import Path

from puna.store.create import Recipe
from puna.store.show import show
from puna.store.store import Store
from tests.unit.store.gguf_files import JINJA, write_model


def test_metadata_and_tensors(store: Store, tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "x.gguf",
        general__name="hidden",
        tokenizer__chat_template=JINJA,
        llama__epsilon=1e-05,
        llama__endless=float("inf"),
        llama__list=[1, 2, 3],
    )
    reply = show(store.from_file(path))
    assert reply.template == JINJA
    assert reply.model_info["llama.epsilon"] == 1e-05
    assert reply.model_info["llama.endless"] is None
    assert reply.model_info["llama.list"] is None
    assert reply.model_info["general.parameter_count"] == 128
    assert not {"general.name", "tokenizer.chat_template"} & reply.model_info.keys()
    assert [tensor.model_dump() for tensor in reply.tensors] == [{"name": "token_embd.weight", "type": "F32", "shape": [32, 4]}]
    assert show(store.from_file(path), verbose=True).model_info["llama.list"] == [1, 2, 3]


def test_empty_fields_are_left_out(store: Store, base: str) -> None:
    fields = show(store.get(base)).model_dump(mode="json")
    assert "system" not in fields
    assert "license" not in fields
    assert "projector_info" not in fields
    assert fields["details"]["families"] == ["llama"]
    assert fields["parameters"].splitlines()[0] == 'stop                           "a"'


def test_the_request_can_replace_the_system_message(store: Store, base: str) -> None:
    store.create("m", Recipe(base=base, system="one"))
    assert show(store.get("m"), system="two").system == "two"


def test_a_file_that_went_bad_still_shows_the_rest(store: Store, base: str) -> None:
    store.get(base).model_path.write_bytes(b"GGUF")
    reply = show(Store(store.root).get(base))
    assert reply.model_info == {}
    assert reply.tensors == []
    assert reply.details.family == "llama"
