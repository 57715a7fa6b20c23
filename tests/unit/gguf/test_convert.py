"""Checkpoints that cannot be converted, and files that only pretend to be safetensors."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from puna.errors import FileFormatError, UnsupportedModel
from puna.gguf.convert.checkpoint import Checkpoint
from puna.gguf.convert.registry import convert as convert_registry
from puna.gguf.convert.safetensors import SafetensorsFile
from puna.gguf.reader import GGUFFile

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "##re", "[", "##"]
CONFIG: dict[str, Any] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 12,
}
POOLING = {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
MEAN = {"pooling_mode_mean_tokens": True}


def write_safetensors(path: Path, tensors: dict[str, np.ndarray[Any, Any]], dtype: str = "F32") -> None:
    header, data = {}, b""
    for name, values in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [len(data), len(data) + values.nbytes]}
        data += values.tobytes()
    encoded = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def convert(folder: Path, target: Path) -> None:
    convert_registry(Checkpoint.of_folder(folder), target)


def tensors(prefix: str = "") -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (len(PIECES), 8),
        "embeddings.position_embeddings.weight": (12, 8),
        "embeddings.token_type_embeddings.weight": (2, 8),
        "pooler.dense.weight": (8, 8),
    }
    for name in ("embeddings.LayerNorm", "encoder.layer.0.attention.output.LayerNorm", "encoder.layer.0.output.LayerNorm"):
        shapes |= {f"{name}.weight": (8,), f"{name}.bias": (8,)}
    for name, (n_out, n_in) in {
        **{f"attention.self.{part}": (8, 8) for part in ("query", "key", "value")},
        "attention.output.dense": (8, 8),
        "intermediate.dense": (16, 8),
        "output.dense": (8, 16),
    }.items():
        shapes |= {f"encoder.layer.0.{name}.weight": (n_out, n_in), f"encoder.layer.0.{name}.bias": (n_out,)}
    return {prefix + name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def checkpoint(folder: Path, pooling: dict[str, Any] | None = None, prefix: str = "", **config: Any) -> Path:
    write_safetensors(folder / "model.safetensors", tensors(prefix))
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_names_types_and_pieces(tmp_path: Path, prefix: str) -> None:
    convert(checkpoint(tmp_path, prefix=prefix), tmp_path / "out.gguf")
    with GGUFFile.open(tmp_path / "out.gguf") as file:
        assert file.architecture == "bert"
        assert file.metadata.integer("pooling_type") == 1
        assert file.tensors["token_embd.weight"].shape == (8, len(PIECES))
        assert file.tensors["blk.0.ffn_down.weight"].type.name == "F16"
        assert file.tensors["position_embd.weight"].type.name == "F32"
        assert len(file.tensors) == 5 + 16
        raw = (tmp_path / "out.gguf").read_bytes()
    assert all(piece.encode() in raw for piece in ("[CLS]", "\u2581the", "\u2581[", "\u2581##"))
    assert b"##re" not in raw


@pytest.mark.parametrize(
    ("files", "keys"),
    [
        ({}, {}),
        ({"tokenizer_config.json": {"do_lower_case": False}}, {"lowercase": False}),
        (
            {"tokenizer.json": {"normalizer": {"lowercase": True, "strip_accents": False}}},
            {"lowercase": True, "strip_accents": False},
        ),
        ({"tokenizer.json": {"normalizer": {"lowercase": False, "strip_accents": None}}}, {"lowercase": False}),
    ],
)
def test_what_happens_to_letters(files: dict[str, Any], keys: dict[str, bool], tmp_path: Path) -> None:
    checkpoint(tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    convert(tmp_path, tmp_path / "out.gguf")
    prefix = "tokenizer.ggml.normalizer."
    with GGUFFile.open(tmp_path / "out.gguf") as file:
        assert {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)} == keys


@pytest.mark.parametrize(
    ("pooling", "number"), [(MEAN, 1), ({"pooling_mode_cls_token": True}, 2), ({"pooling_mode_lasttoken": True}, 3)]
)
def test_pooling(tmp_path: Path, pooling: dict[str, Any], number: int) -> None:
    convert(checkpoint(tmp_path, pooling), tmp_path / "out.gguf")
    with GGUFFile.open(tmp_path / "out.gguf") as file:
        assert file.metadata.integer("pooling_type") == number


@pytest.mark.parametrize(
    ("files", "error", "says"),
    [
        ({"config.json": "{"}, FileFormatError, "config.json"),
        (
            {"config.json": json.dumps(CONFIG | {"hidden_act": "relu"})},
            UnsupportedModel,
            "hidden_act is relu; a bert can only be converted with gelu or gelu_new",
        ),
        ({"config.json": json.dumps(CONFIG | {"model_type": "roberta"})}, UnsupportedModel, "roberta"),
        ({"1_Pooling/config.json": json.dumps(MEAN | {"pooling_mode_cls_token": True})}, UnsupportedModel, "exactly one"),
        ({"modules.json": "[]"}, UnsupportedModel, "names no pooling"),
        (
            {"modules.json": json.dumps([POOLING, {"path": "2_Dense", "type": "sentence_transformers.models.Dense"}])},
            UnsupportedModel,
            "a module sentence_transformers.models.Dense cannot be converted",
        ),
        ({"vocab.txt": "[PAD]\n[UNK]\n"}, FileFormatError, r"lacks \[CLS\], \[SEP\], \[MASK\]"),
        ({"vocab.txt": "\n".join([*PIECES, "more"])}, FileFormatError, "9 embeddings for a vocabulary of 10"),
        ({"model.safetensors": "short"}, FileFormatError, "too short"),
        ({"config.json": json.dumps(CONFIG | {"num_hidden_layers": 2})}, FileFormatError, "encoder.layer.1.attention.self.query"),
    ],
)
def test_what_cannot_be_converted_is_named(tmp_path: Path, files: dict[str, str], error: type[Exception], says: str) -> None:
    checkpoint(tmp_path, MEAN)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(error, match=says):
        convert(tmp_path, tmp_path / "out.gguf")


def entry(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (entry(data_offsets=[0, 16]), "needs 8 bytes"),
        (entry(data_offsets=[8, 16]), "the file ends before"),
        (entry(data_offsets=[-8, 0]), "lies at -8..0"),
        (entry(data_offsets=[8, 0]), "lies at 8..0"),
        (entry(shape=[1 << 40, 1 << 40]), "needs"),
        (entry(shape=[-1, -2]), "impossible shape"),
        (entry(shape=[2] * 9), "impossible shape"),
        (entry(dtype="F6_E2M3"), "type F6_E2M3"),
        (entry(data_offsets="x"), "header is not"),
        (entry() | {"b": {"dtype": "F16", "shape": [2], "data_offsets": [4, 8]}}, "tensors a and b overlap"),
        ({"a": 1}, "header is not"),
        ([], "header is not"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: Any, says: str) -> None:
    encoded = json.dumps(header).encode()
    (tmp_path / "a").write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(8))
    with pytest.raises(FileFormatError, match=says):
        SafetensorsFile(tmp_path / "a")


@pytest.mark.parametrize("length", [1 << 20, 1 << 62])
def test_a_header_longer_than_the_file_is_refused(tmp_path: Path, length: int) -> None:
    (tmp_path / "a").write_bytes(struct.pack("<Q", length) + bytes(100))
    with pytest.raises(FileFormatError, match="does not fit"):
        SafetensorsFile(tmp_path / "a")


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_read(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "a"
    path.write_bytes(struct.pack("<Q", max(len(content) - 8, 0)) + content)
    with contextlib.suppress(FileFormatError):
        SafetensorsFile(path).close()
    path.unlink()


def test_every_float_type_is_read(tmp_path: Path) -> None:
    values = np.array([[1.5, -2.0], [0.25, 8.0]], np.float32)
    stored: dict[str, np.ndarray[Any, Any]] = {
        "F32": values,
        "F64": values.astype(np.float64),
        "F16": values.astype(np.float16),
        "BF16": (values.view(np.uint32) >> 16).astype(np.uint16),
    }
    for dtype, array in stored.items():
        write_safetensors(tmp_path / dtype, {"a": array}, dtype)
        with SafetensorsFile(tmp_path / dtype) as file:
            np.testing.assert_array_equal(file.floats("a"), values)
    write_safetensors(tmp_path / "I64", {"a": np.array([1, 2])}, "I64")
    with SafetensorsFile(tmp_path / "I64") as file, pytest.raises(FileFormatError, match="type I64"):
        file.floats("a")
