from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from puna.errors import BadRequest, FileFormatError
from puna.gguf.writer import GGUFWriter
from puna.native import vocabulary as vocabulary_module
from puna.native.llama import llama
from puna.native.vocabulary import Vocabulary
from puna.tokenizer.tokenizer import EndTokens, Tokenizer
from tests.models.dialect import Translation
from tests.overtaken import Overtaken
from tests.tiny import write_llama


@pytest.fixture(scope="module", params=["bpe", "spm"])
def vocabulary(request: pytest.FixtureRequest) -> Literal["bpe", "spm"]:
    return request.param  # type: ignore[no-any-return]  # one of the two above


@pytest.fixture(scope="module")
def tokenizer(vocabulary: Literal["bpe", "spm"], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    found = Tokenizer(write_llama(tmp_path_factory.mktemp("t") / "m.gguf", vocab=vocabulary))
    yield found
    found.close()


@settings(max_examples=150)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=60))
@example(" ")
@example("\u2581 a\u2581")
def test_text_survives_the_round_trip(vocabulary: str, tokenizer: Tokenizer, text: str) -> None:
    back = tokenizer.decode(tokenizer.encode(text, add_special=False, parse_special=False))
    if vocabulary == "spm" and text:
        # SentencePiece puts a space before a text, and a space and its own mark for one are the same to it.
        assert back == " " + text.replace("\u2581", " ")
    else:
        assert back == text


def test_special_text_becomes_its_token_only_when_asked(tokenizer: Tokenizer) -> None:
    parsed = tokenizer.encode("<|im_end|>", add_special=False)
    assert len(parsed) - len(tokenizer.encode("", add_special=False)) <= 2
    assert tokenizer.end_tokens & set(parsed)
    literal = tokenizer.encode("<|im_end|>", add_special=False, parse_special=False)
    assert not tokenizer.end_tokens & set(literal)


def test_begin_token_is_added_once(tokenizer: Tokenizer) -> None:
    assert tokenizer.adds_bos
    begin = tokenizer.piece(tokenizer.bos, special=True).decode()
    assert tokenizer.encode("hello")[0] == tokenizer.bos
    assert tokenizer.encode(begin + "hello").count(tokenizer.bos) == 1


def test_control_tokens_have_no_text_unless_asked(tokenizer: Tokenizer) -> None:
    end = next(iter(tokenizer.end_tokens))
    assert tokenizer.piece(end) == b""
    assert tokenizer.piece(end, special=True) != b""


def test_an_end_is_recognised_without_a_look_at_the_whole_vocabulary(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = set(tokenizer.end_tokens)
    monkeypatch.setattr(Vocabulary, "end_of_generation", lambda _: pytest.fail("every token was asked about"))
    fresh = EndTokens(tokenizer._vocabulary, [0])
    assert {token for token in range(-2, tokenizer.n_tokens + 2) if token in fresh} == ends | {0}


@pytest.mark.parametrize("token", [-1, 10**7])
def test_tokens_outside_the_vocabulary_are_refused(tokenizer: Tokenizer, token: int) -> None:
    with pytest.raises(BadRequest, match="not in the vocabulary"):
        tokenizer.piece(token)


def test_a_file_without_a_vocabulary_is_named(tmp_path: Path) -> None:
    writer = GGUFWriter("llama")
    writer.add("llama.block_count", 1)
    writer.write(tmp_path / "bare.gguf")
    with pytest.raises(FileFormatError, match=r"bare\.gguf"):
        Tokenizer(tmp_path / "bare.gguf")


@pytest.mark.parametrize("vocab", ["bpe", "spm"])
def test_a_vocabulary_is_the_same_whatever_the_file_calls_its_architecture(vocab: Literal["bpe", "spm"], tmp_path: Path) -> None:
    """Files of other programs have names that libllama does not know."""
    path = write_llama(tmp_path / "m.gguf", vocab=vocab)
    other = Translation(path).save(tmp_path / "other.gguf", "unheard-of")
    known, found = Tokenizer(path), Tokenizer(other)
    text = "<|im_start|>The answer is that I do not know ☃<|im_end|>"
    assert found.encode(text) == known.encode(text)
    assert (found.n_tokens, found.bos, found.end_tokens) == (known.n_tokens, known.bos, known.end_tokens)
    for tokenizer in (known, found):
        tokenizer.close()


def test_a_tokenizer_that_was_closed_is_not_asked(tmp_path: Path) -> None:
    """What ends an answer is looked up in the library, whose memory is gone."""
    tokenizer = Tokenizer(write_llama(tmp_path / "model.gguf", n_layers=1))
    ends = tokenizer.end_tokens
    tokenizer.close()
    with pytest.raises(AssertionError, match="closed"):
        assert 7 in ends


def test_a_tokenizer_is_closed_when_nobody_is_in_the_middle_of_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library gives Python's lock away meanwhile."""
    path = write_llama(tmp_path / "model.gguf", n_layers=1)
    before = Tokenizer(path)
    whole = before.encode("the quick brown fox")
    before.close()
    overtaken = Overtaken(llama(), "llama_tokenize", "llama_model_free")
    monkeypatch.setattr(vocabulary_module, "llama", lambda: overtaken)
    tokenizer = Tokenizer(path)
    found = overtaken.play(lambda: tokenizer.encode("the quick brown fox"), tokenizer.close)
    assert (found, overtaken.events) == ([whole], ["called", "freed"])
