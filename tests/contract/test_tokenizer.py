from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puna.errors import BadRequest, FileFormatError
from puna.gguf.writer import GGUFWriter
from puna.tokenizer.tokenizer import Tokenizer
from tests.tiny import write_llama


@pytest.fixture(scope="module", params=["bpe", "spm"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    found = Tokenizer(write_llama(tmp_path_factory.mktemp("t") / "m.gguf", vocab=request.param))
    yield found
    found.close()


@settings(max_examples=150, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=60))
def test_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    back = tokenizer.decode(tokenizer.encode(text, add_special=False, parse_special=False))
    assert back.removeprefix(" ") == text.removeprefix(" ")  # SentencePiece puts a space before the first word


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
