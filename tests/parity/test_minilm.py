"""A real sentence encoder, all-MiniLM-L6-v2, from its published weights: converted, embedded, and compared with its
definition.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from puna.gguf.convert.checkpoint import Checkpoint
from puna.gguf.convert.registry import convert
from puna.tokenizer.tokenizer import Tokenizer
from tests.minilm import NumpyBert, unpack_checkpoint
from tests.parity.test_embeddings import Running, cosines, reference

SENTENCES = [
    "hello world",
    "That is a happy person",
    "That is a very happy dog",
    "Today is a sunny day",
    "Élan and naïveté: how do neural networks turn text into vectors?",
    "The quick brown fox jumps over the lazy dog, then sleeps until the evening because the sun is warm.",
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_checkpoint(tmp_path_factory.mktemp("minilm"))


@pytest.fixture(scope="module")
def converted(checkpoint: Path) -> Path:
    convert(Checkpoint.of_folder(checkpoint), checkpoint / "minilm.gguf")
    return checkpoint / "minilm.gguf"


@pytest.fixture(scope="module")
def running(converted: Path) -> Iterator[Running]:
    running = Running(converted, n_ctx=512)
    yield running
    running.engine.close()


def test_text_becomes_the_tokens_of_the_published_tokenizer(converted: Path) -> None:
    tokenizer = Tokenizer(converted)
    assert tokenizer.encode("hello world") == [101, 7592, 2088, 102]
    # Lower case, no accents, punctuation apart: el ##an , naive token ##ization !
    assert tokenizer.encode("Élan, naïve tokenization!") == [101, 3449, 2319, 1010, 15743, 19204, 3989, 999, 102]
    tokenizer.close()


def test_embeddings_are_those_of_the_definition(running: Running, checkpoint: Path, converted: Path) -> None:
    tokenizer, definition = Tokenizer(converted), NumpyBert(checkpoint)
    expected = np.stack([definition.embed(tokenizer.encode(sentence)) for sentence in SENTENCES])
    tokenizer.close()
    assert cosines(running.embed(SENTENCES), expected).min() >= 0.999


def test_embeddings_are_those_of_libllama(running: Running, converted: Path) -> None:
    assert cosines(running.embed(SENTENCES, normalize=False), reference(converted, SENTENCES)).min() >= 0.9999


def test_what_means_the_same_lies_together(running: Running) -> None:
    person, happy, dog, weather = running.embed(
        ["That is a happy person", "That is a very happy person", "That is a happy dog", "The bond market fell sharply"]
    )
    assert person @ happy > person @ dog > 0.5 > 0.2 > person @ weather


def test_a_vocabulary_in_tokenizer_json_is_the_same(checkpoint: Path, converted: Path, tmp_path: Path) -> None:
    """Other clients send no vocab.txt."""
    files = Checkpoint.of_folder(checkpoint).files
    convert(Checkpoint({name: path for name, path in files.items() if name != "vocab.txt"}), tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_bytes() == converted.read_bytes()
