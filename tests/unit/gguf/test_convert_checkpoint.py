"""Folders that are incomplete, hold more than one form of a model, or only pretend: each is refused by name, or read."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from puna.errors import FileFormatError, PunaError
from puna.gguf.convert import checkpoint as checkpoints
from puna.gguf.convert.checkpoint import Checkpoint
from puna.gguf.convert.registry import convert
from puna.gguf.convert.safetensors import MAX_HEADER_BYTES, SafetensorsFile
from tests.checkpoints.folder import tensors, write_case
from tests.hf import write_safetensors

INDEX = "model.safetensors.index.json"


def converted(folder: Path) -> bytes:
    convert(Checkpoint.of_folder(folder), folder / "out.gguf")
    return (folder / "out.gguf").read_bytes()


def indexed(folder: Path) -> dict[str, str]:
    """A checkpoint in three files, with their index; returns what that says."""
    write_case(folder, "llama", n_shards=3)
    files = sorted(folder.glob("*.safetensors"))
    places: dict[str, str] = {}
    for path in files:
        with SafetensorsFile(path) as file:
            places |= dict.fromkeys(file.tensors, path.name)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    return places


def test_the_files_of_an_index_are_the_model(tmp_path: Path) -> None:
    """Whatever else lies there: some publish the same weights a second time, under other names."""
    indexed(tmp_path / "a")
    write_safetensors(tmp_path / "a" / "consolidated.safetensors", {"layers.0.attention.wq.weight": np.zeros((2, 2), np.float16)})
    assert converted(tmp_path / "a") == converted(write_case(tmp_path / "b", "llama"))


@pytest.mark.parametrize(("n_shards", "name"), [(1, "model.safetensors"), (3, "shards")])
def test_another_form_of_the_same_model_is_left_alone(n_shards: int, name: str, tmp_path: Path) -> None:
    folder = write_case(tmp_path / "a", "llama", n_shards=n_shards)
    write_safetensors(folder / "consolidated.safetensors", {"layers.0.attention.wq.weight": np.zeros((2, 2), np.float16)})
    assert converted(folder) == converted(write_case(tmp_path / "b", "llama")), name


def test_a_file_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    indexed(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileFormatError, match=rf"{INDEX} names the file model-00002-of-00003.safetensors, which"):
        converted(tmp_path)


def test_a_tensor_that_the_index_names_must_be_in_its_file(tmp_path: Path) -> None:
    places = indexed(tmp_path)
    places["model.layers.9.mlp.up_proj.bias"] = "model-00001-of-00003.safetensors"
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
    with pytest.raises(FileFormatError, match=r"model-00001-of-00003.safetensors: there is no tensor model.layers.9"):
        converted(tmp_path)


@pytest.mark.parametrize("index", ["[]", "{", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "{}", '{"weight_map": {}}'])
def test_an_index_that_is_none(index: str, tmp_path: Path) -> None:
    write_case(tmp_path, "llama")
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(FileFormatError, match=r"index.json|no tensors"):
        converted(tmp_path)


def test_an_index_that_leads_out_of_the_checkpoint(tmp_path: Path) -> None:
    write_case(tmp_path / "a", "llama")
    write_safetensors(tmp_path / "secret.safetensors", tensors("llama"))
    places = dict.fromkeys(tensors("llama"), "../secret.safetensors")
    (tmp_path / "a" / INDEX).write_text(json.dumps({"weight_map": places}))
    with pytest.raises(FileFormatError, match=r"names the file \.\./secret.safetensors, which the checkpoint does not have"):
        converted(tmp_path / "a")


def test_numbered_files_must_all_be_there(tmp_path: Path) -> None:
    write_case(tmp_path, "llama", n_shards=3)
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(FileFormatError, match=r"has model-00001-of-00003.safetensors, but not model-00003-of-00003.safetensors"):
        converted(tmp_path)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("[" * 100_000, "config.json: "),
        ('{"a":' * 100_000, "config.json: "),
        ('{"hidden_size": ' + "9" * 5000 + "}", "config.json: "),
        ("[]", "config.json: not an object"),
        ('{"architectures": 7}', 'unsupported architecture ""'),
        ('{"architectures": [["LlamaForCausalLM"]]}', "unsupported architecture"),
        ('{"architectures": ["LlamaForCausalLM"], "hidden_size": Infinity}', "hidden_size is inf"),
        ('{"architectures": ["LlamaForCausalLM"], "text_config": "x"}', "is missing"),
        ('{"architectures": ["LlamaForCausalLM"], "quantization_config": "x"}', "is missing|quantization_config"),
        ('{"architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "MM"}', "num_hidden_layers is missing"),
        ('{"architectures": ["FalconH1ForCausalLM"], "mamba_n_heads": 0}', "mamba_n_heads is 0"),
        (
            '{"architectures": ["FalconH1ForCausalLM"], "mamba_n_heads": 1048576, "mamba_d_head": 1048576, "mamba_d_state": 1}',
            "mamba_n_heads is 1048576, which makes 1099511627776 channels",
        ),
        ('{"a": "' + "x" * checkpoints.MAX_CONFIG_BYTES + '"}', f"config.json: larger than {checkpoints.MAX_CONFIG_BYTES} bytes"),
    ],
)
def test_a_configuration_that_is_none(config: str, says: str, tmp_path: Path) -> None:
    write_case(tmp_path, "llama")
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(PunaError, match=says):
        converted(tmp_path)


def raw(path: Path, header: bytes, data: bytes = b"") -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


def test_a_header_is_bounded(tmp_path: Path) -> None:
    """A file of that length exists: nothing of the header is read."""
    with (tmp_path / "a").open("wb") as file:
        file.write(struct.pack("<Q", MAX_HEADER_BYTES + 1))
        file.truncate(MAX_HEADER_BYTES + 100)
    with pytest.raises(FileFormatError, match=f"a header of {MAX_HEADER_BYTES + 1} bytes does not fit"):
        SafetensorsFile(tmp_path / "a")


def test_what_a_header_says_beside_tensors_is_not_kept(tmp_path: Path) -> None:
    entry: dict[str, Any] = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    more = {str(i): "x" * 100 for i in range(20_000)}
    header = json.dumps({"__metadata__": more, "a": {**entry, "more": [more]}}).encode()
    path = raw(tmp_path / "a", header, bytes(4))
    tracemalloc.start()
    try:
        with SafetensorsFile(path) as file:
            assert list(file.tensors) == ["a"]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * len(header)  # its bytes, and little else


def test_tensors_of_all_files_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "MAX_TENSORS", 20)
    write_case(tmp_path, "llama", n_shards=3)
    with pytest.raises(FileFormatError, match="with this file there are more than 20 tensors"):
        converted(tmp_path)


@pytest.mark.parametrize("entry", [{"shape": [1], "data_offsets": [0, 4]}, {}, {"dtype": "F32"}, {"dtype": "", "shape": [0]}])
def test_an_entry_without_a_type_or_a_place(entry: dict[str, Any], tmp_path: Path) -> None:
    path = raw(tmp_path / "a", json.dumps({"a": entry}).encode(), bytes(4))
    with pytest.raises(FileFormatError, match="tensor a"):
        SafetensorsFile(path)
