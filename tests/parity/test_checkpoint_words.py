"""Tokenizers as they are published, converted: texts become the tokens that the library tokenizers 0.23 makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from puna.errors import FileFormatError, UnsupportedModel
from puna.gguf.convert.checkpoint import Checkpoint
from puna.gguf.convert.registry import convert
from puna.gguf.reader import GGUFFile
from puna.tokenizer.tokenizer import Tokenizer
from tests.checkpoints.folder import VECTORS, write_case
from tests.checkpoints.words import CUTS, MARKS, TEXTS, of_bytes, of_characters

EXPECTED: dict[str, list[list[int]]] = json.loads((VECTORS / "words.json").read_text())


def converted(folder: Path, tokenizer: dict[str, Any], settings: dict[str, Any] | None = None) -> Path:
    write_case(folder, "llama")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings or {}))
    convert(Checkpoint.of_folder(folder), folder / "out.gguf")
    return folder / "out.gguf"


@pytest.mark.parametrize("kind", [*CUTS, *MARKS])
def test_texts_become_the_same_tokens(kind: str, tmp_path: Path) -> None:
    is_bytes = kind in CUTS
    path = converted(tmp_path, of_bytes(kind) if is_bytes else of_characters(kind))
    with GGUFFile.open(path) as file:
        name = file.metadata["tokenizer.ggml.pre" if is_bytes else "tokenizer.ggml.model"]
        assert name == (CUTS[kind][2] if is_bytes else MARKS[kind][2])
    tokenizer = Tokenizer(path)
    try:
        found = [tokenizer.encode(text, add_special=False, parse_special=False) for text in TEXTS]
        texts = [tokenizer.decode(tokens) for tokens in EXPECTED[kind]]
    finally:
        tokenizer.close()
    assert found == EXPECTED[kind]
    begin = " " if name == "llama" else ""  # libllama keeps the space that is put before a text
    assert texts == [begin + text if text else "" for text in TEXTS]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"normalizer": {"type": "Lowercase"}}, 'this normalizer is not known: {"type":"Lowercase"}'),
        ({"pre_tokenizer": {"type": "BertPreTokenizer"}}, "this pre_tokenizer is not known"),
        ({"model": {"type": "Unigram"}}, "'Unigram' cannot be converted, only BPE can"),
        ({"model": {"type": "Unigram", "byte_fallback": True}}, "'Unigram' cannot be converted, only BPE can"),
        ({"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b c"]}}, "a merge that is no pair"),
        ({"added_tokens": [{"id": 4000, "content": "x"}]}, "the number 4000"),
    ],
)
def test_what_gives_other_tokens_is_refused(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises((FileFormatError, UnsupportedModel), match=says):
        converted(tmp_path, of_bytes("llama-3") | changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"normalizer": None, "pre_tokenizer": None}, "this normalizer is not known: null"),
        ({"normalizer": {"type": "NFKC"}}, "this normalizer is not known"),
        (
            {"normalizer": None, "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}},
            "this pre_tokenizer is not known",
        ),
    ],
)
def test_spaces_that_become_something_else_are_refused(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=says):
        converted(tmp_path, of_characters("gemma") | changes)


def test_all_tokens_that_end_an_answer_do(tmp_path: Path) -> None:
    """One of the tokenizer's file, others of the model's configuration and of the one for generating."""
    write_case(tmp_path, "llama", eos_token_id=[377, 378])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [378, 42, 43]}))
    convert(Checkpoint.of_folder(tmp_path), tmp_path / "out.gguf")
    tokenizer = Tokenizer(tmp_path / "out.gguf")
    ends = set(tokenizer.end_tokens)
    tokenizer.close()
    assert ends >= {379, 377, 378, 42, 43}
    assert 44 not in ends


@pytest.mark.parametrize("token", [[1, 100000], "x", [-1]])
def test_an_end_that_is_no_token_is_refused(token: Any, tmp_path: Path) -> None:
    write_case(tmp_path, "llama")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": token}))
    with pytest.raises(FileFormatError, match=r"generation_config\.json"):
        convert(Checkpoint.of_folder(tmp_path), tmp_path / "out.gguf")
