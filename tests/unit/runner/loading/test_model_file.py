from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tests.patience import PATIENCE_S
from tests.tiny import write_llama

from puna.errors import FileFormatError
from puna.gguf.reader import GGUFFile
from puna.runner.loading import model_file
from puna.runner.loading.model_file import ModelFile


class Vocabulary:
    """Stands for the one that libllama would read."""

    def __init__(self, path: Path, head: GGUFFile) -> None:
        self.thread = threading.current_thread()
        self.can_read = head.metadata.has("tokenizer.ggml.tokens")
        self.is_closed = False
        made.append(self)

    def close(self) -> None:
        self.is_closed = True


made: list[Vocabulary] = []


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelFile:
    made.clear()
    monkeypatch.setattr(model_file, "Tokenizer", Vocabulary)
    return ModelFile(write_llama(tmp_path / "m.gguf"))


def test_the_vocabulary_is_read_beside_everything_else(file: ModelFile) -> None:
    file.head()
    vocabulary = file.tokenizer()
    assert (len(made), id(made[0])) == (1, id(vocabulary))
    assert made[0].thread is not threading.current_thread()
    assert file.tokenizer() is vocabulary
    file.close()


def test_where_no_thread_can_read_it_the_next_load_tries_again(file: ModelFile) -> None:
    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        with pytest.raises(RuntimeError, match="new thread"):
            file.head()
    file.head()
    assert id(file.tokenizer()) == id(made[0])
    file.close()


def test_it_is_begun_before_anybody_asks_for_it(file: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()

    class Told(Vocabulary):
        def __init__(self, path: Path, head: GGUFFile) -> None:
            begun.set()
            super().__init__(path, head)

    monkeypatch.setattr(model_file, "Tokenizer", Told)
    file.head()
    assert begun.wait(PATIENCE_S)
    file.close()


def test_one_that_nobody_asked_for_is_closed_too_and_the_file_after_it(file: ModelFile) -> None:
    head = file.head()
    file.close()
    assert made[0].is_closed
    assert made[0].can_read
    with pytest.raises(ValueError, match="closed"):
        head.tensor_data("token_embd.weight")


def test_a_file_that_changes_is_read_anew(file: ModelFile) -> None:
    file.head()
    before = file.tokenizer()
    write_llama(file.path, n_layers=3)
    file.head()
    assert file.tokenizer() is not before
    assert made[0].is_closed
    file.close()


def test_a_vocabulary_that_cannot_be_read_is_an_error_of_who_asks(file: ModelFile, monkeypatch: pytest.MonkeyPatch) -> None:
    class Unreadable(Vocabulary):
        def __init__(self, path: Path, head: GGUFFile) -> None:
            raise FileFormatError("no vocabulary")

    monkeypatch.setattr(model_file, "Tokenizer", Unreadable)
    file.head()
    for _ in range(2):
        with pytest.raises(FileFormatError, match="no vocabulary"):
            file.tokenizer()
    file.close()
