from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from puna.errors import FileFormatError
from puna.gguf.metadata import Metadata
from puna.gguf.reader import GGUFFile
from puna.gguf.types import ValueType
from puna.gguf.writer import GGUFWriter
from tests.unit.gguf import raw_file


@pytest.fixture
def metadata(tmp_path: Path) -> Iterator[Metadata]:
    writer = GGUFWriter("llama")
    writer.add("general.name", "Tiny")
    writer.add("llama.block_count", 3, ValueType.UINT64)
    writer.add("llama.narrow", -5, ValueType.INT8)
    writer.add("llama.whole_float", 8.0)
    writer.add("llama.float", 0.5)
    writer.add("llama.infinite", float("inf"))
    writer.add("llama.flag", True)
    writer.add("llama.flag_as_number", 1)
    writer.add("llama.per_head", [4, 0, 2])
    writer.add("llama.rates", [0.5, 2.0])
    writer.add("llama.pattern", [True, False, True])
    writer.add("llama.nothing", [], element=ValueType.UINT32)
    writer.add("tokenizer.ggml.tokens", [b"a", "é".encode(), b"\xff"])
    path = tmp_path / "model.gguf"
    writer.write(path)
    with GGUFFile.open(path) as file:
        yield file.metadata


@pytest.mark.parametrize("key", ["block_count", "llama.block_count"])
def test_the_architecture_is_put_in_front(metadata: Metadata, key: str) -> None:
    assert metadata.integer(key) == 3
    assert metadata.has(key)


def test_keys_that_stand_alone(metadata: Metadata) -> None:
    assert metadata.string("general.name") == "Tiny"
    assert metadata.strings("tokenizer.ggml.tokens") == ["a", "é", "\ufffd"]
    assert not metadata.has("general.block_count")


@pytest.mark.parametrize(
    ("key", "value"), [("block_count", 3), ("narrow", -5), ("whole_float", 8), ("flag", 1), ("flag_as_number", 1)]
)
def test_integers_of_any_storage(metadata: Metadata, key: str, value: int) -> None:
    found = metadata.integer(key)
    assert found == value
    assert type(found) is int


def test_other_kinds(metadata: Metadata) -> None:
    assert metadata.number("float") == 0.5
    assert metadata.number("block_count") == 3.0
    assert metadata.boolean("flag") is True
    assert metadata.boolean("flag_as_number") is True
    assert metadata.integers("per_head") == [4, 0, 2]
    assert metadata.integers("block_count") == [3]
    assert metadata.integers("nothing") == []
    assert metadata.numbers("rates") == [0.5, 2.0]
    assert metadata.per_layer("per_head", 3) == [4, 0, 2]
    assert metadata.per_layer("block_count", 3) == [3, 3, 3]
    assert metadata.per_layer("pattern", 3) == [1, 0, 1]
    assert metadata.per_layer("absent", 2, 7) == [7, 7]


def test_defaults_are_returned_as_they_are(metadata: Metadata) -> None:
    assert metadata.integer("absent", None) is None
    assert metadata.integer("absent", 5) == 5
    assert metadata.number("absent", 1.5) == 1.5
    assert metadata.string("absent", "x") == "x"
    assert metadata.boolean("absent", False) is False
    assert metadata.integers("absent", None) is None
    assert metadata.numbers("absent", None) is None
    assert metadata.strings("absent", None) is None


@pytest.mark.parametrize(
    ("method", "key", "message"),
    [
        ("integer", "absent", r"key 'llama\.absent' is missing"),
        ("integer", "float", r"key 'llama\.float' is 0\.5, not a whole number"),
        ("integer", "infinite", "is inf, not a whole number"),
        ("integer", "general.name", "is 'Tiny', not a whole number"),
        ("integer", "per_head", "not a whole number"),
        ("number", "general.name", "not a number"),
        ("string", "block_count", "is 3, not a string"),
        ("boolean", "block_count", "is 3, not a boolean"),
        ("boolean", "float", "not a boolean"),
        ("integers", "rates", "is 0.5, not a whole number"),
        ("strings", "per_head", "not an array of strings"),
        ("array", "block_count", "not an array"),
        ("array", "absent", "is missing"),
    ],
)
def test_wrong_kinds(metadata: Metadata, method: str, key: str, message: str) -> None:
    with pytest.raises(FileFormatError, match=message) as caught:
        getattr(metadata, method)(key)
    assert "model.gguf" in str(caught.value)


def test_per_layer_of_another_length(metadata: Metadata) -> None:
    with pytest.raises(FileFormatError, match=r"key 'llama\.per_head' has 3 items for 4 layers"):
        metadata.per_layer("per_head", 4)


def test_a_file_without_architecture(tmp_path: Path) -> None:
    path = raw_file.write(tmp_path, raw_file.assemble(keys=[]))
    with GGUFFile.open(path) as file:
        assert file.metadata.string("general.name", None) is None
        with pytest.raises(FileFormatError, match=r"'general\.architecture' is missing"):
            _ = file.architecture
        with pytest.raises(FileFormatError, match=r"'general\.architecture' is missing"):
            file.metadata.integer("block_count", 1)


def test_metadata_is_a_mapping(metadata: Metadata) -> None:
    assert metadata["general.architecture"] == "llama"
    assert next(iter(metadata)) == "general.architecture"
    assert len(metadata) == len(dict(metadata)) == 14


def test_arrays_of_numbers(metadata: Metadata) -> None:
    numbers = metadata.array("per_head")
    assert (len(numbers), numbers[0], numbers[-1], numbers[1:], list(numbers)) == (3, 4, 2, [0, 2], [4, 0, 2])
    assert numbers.numpy().tolist() == [4, 0, 2]
    assert metadata.array("rates").numpy().dtype == np.float32
    assert metadata.array("pattern").numpy().dtype == bool
    assert metadata["llama.pattern"][2] is True
    assert numbers == [4, 0, 2]
    with pytest.raises(TypeError, match="holds no strings"):
        numbers.bytes_at(0)


def test_arrays_of_strings(metadata: Metadata) -> None:
    tokens = metadata.array("tokenizer.ggml.tokens")
    assert (len(tokens), tokens[1], tokens[2], tokens.bytes_at(2)) == (3, "é", "\ufffd", b"\xff")
    assert list(tokens.iter_bytes()) == [b"a", "é".encode(), b"\xff"]
    with pytest.raises(TypeError, match="no numpy form"):
        tokens.numpy()


@pytest.mark.parametrize(
    ("text", "is_there"), [(b"a", True), (b"\xff", True), (b"", True), (b"bc", False), (b"inner", False), (b"last", True)]
)
def test_whether_an_array_holds_a_text(tmp_path: Path, text: bytes, is_there: bool) -> None:
    """Also where another text holds what a text and its length look like."""
    texts = [b"a", raw_file.string("inner"), raw_file.string("last"), b"\xff", b"", b"last"]
    encoded = raw_file.array("x", ValueType.STRING, len(texts), b"".join(map(raw_file.string, texts)))
    with GGUFFile.open(raw_file.write(tmp_path, raw_file.assemble([raw_file.ARCHITECTURE, encoded]))) as file:
        assert file.metadata["x"].holds(text) == is_there


def test_numbers_hold_no_text(metadata: Metadata) -> None:
    with pytest.raises(TypeError, match="holds no strings"):
        metadata.array("per_head").holds(b"4")


@pytest.mark.parametrize("index", [3, -4])
@pytest.mark.parametrize("key", ["tokenizer.ggml.tokens", "per_head"])
def test_outside_an_array(metadata: Metadata, key: str, index: int) -> None:
    with pytest.raises(IndexError, match="outside an array of 3"):
        metadata.array(key)[index]


def test_numbers_outlive_the_file(tmp_path: Path) -> None:
    writer = GGUFWriter("llama")
    writer.add("llama.rates", [0.5, 2.0])
    writer.write(tmp_path / "model.gguf")
    with GGUFFile.open(tmp_path / "model.gguf") as file:
        numbers: Any = file.metadata.array("rates").numpy()
    assert numbers.tolist() == [0.5, 2.0]
