from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from puna.store.models import described
from puna.store.models.show import show
from puna.store.recipe import Recipe
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
    assert reply.tensors == [{"name": "token_embd.weight", "type": "F32", "shape": [32, 4]}]
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


@pytest.fixture
def n_parsed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often a file's head was parsed for show."""
    parsed: list[Path] = []
    read = described._read

    def counted(path: Path, *, verbose: bool) -> described.Description:
        parsed.append(path)
        return read(path, verbose=verbose)

    monkeypatch.setattr(described, "_memory", described._Memory())
    monkeypatch.setattr(described, "_read", counted)
    return lambda: len(parsed)


def test_a_head_is_parsed_once(store: Store, base: str, n_parsed: Callable[[], int]) -> None:
    first = show(store.get(base))
    assert show(store.get(base)).tensors == first.tensors
    assert show(store.get(base), system="x").model_info == first.model_info
    assert n_parsed() == 1
    assert show(store.get(base), verbose=True)
    assert n_parsed() == 2


def test_a_file_that_changed_is_parsed_again(store: Store, tmp_path: Path, n_parsed: Callable[[], int]) -> None:
    path = write_model(tmp_path / "x.gguf", general__size_label="1B")
    assert show(store.from_file(path)).model_info["general.size_label"] == "1B"
    os.utime(path, (1, 1))
    assert show(store.from_file(path)).model_info["general.size_label"] == "1B"
    path.unlink()
    write_model(path, general__size_label="2B")
    os.utime(path, (1, 1))
    assert show(store.from_file(path)).model_info["general.size_label"] == "2B"
    assert n_parsed() == 3


def test_what_is_remembered_is_bounded(
    store: Store, tmp_path: Path, n_parsed: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that was asked for longest ago goes; a file that is too large for all of it is not remembered."""
    models = [store.from_file(write_model(tmp_path / f"{i}.gguf")) for i in range(3)]
    size = described.describe(models[0].weights_path, verbose=False).size
    monkeypatch.setattr(described, "MAX_REMEMBERED", 2 * size)
    before = n_parsed()
    for index in (1, 0, 2, 0, 2, 1):  # 1 has gone when 2 came, and is parsed again
        show(models[index])
    assert n_parsed() - before == 3
    assert described._memory._size == 2 * size
    keys: dict[str, Any] = {f"x__{i}": i for i in range(2 * size)}
    large = store.from_file(write_model(tmp_path / "large.gguf", **keys))
    for _ in range(2):
        show(large)
    assert n_parsed() - before == 5
    assert described._memory._size == 2 * size
