"""A real model's greedy text, token for token that of libllama."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from puna.store.store import Store
from puna.tokenizer.tokenizer import Tokenizer
from tests.oracle import Oracle, side_by_side
from tests.puna_engine import PunaEngine

QUESTIONS = [
    "What is the capital of France? Answer in one short sentence.",
    "Write a short story about a lighthouse keeper and a whale.",
    "Explain how photosynthesis works to a child of ten.",
    "List the planets of the solar system and one fact about each.",
    "Write a Python function that checks whether a word is a palindrome.",
]
COUNT = 256


@pytest.fixture(scope="module")
def engines(starter_store: Store) -> Iterator[tuple[PunaEngine, Oracle, Tokenizer]]:
    path = starter_store.get("smollm2:135m").model_path
    tokenizer = Tokenizer(path)
    with PunaEngine(path, n_ctx=1024) as puna, Oracle(path, n_ctx=1024) as oracle:
        yield puna, oracle, tokenizer
    tokenizer.close()


@pytest.mark.parametrize("question", QUESTIONS)
def test_greedy_text_is_libllama_s(engines: tuple[PunaEngine, Oracle, Tokenizer], question: str) -> None:
    puna, oracle, tokenizer = engines
    puna.forget()
    oracle.forget()
    prompt = tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
    ours, theirs = side_by_side(lambda: puna.greedy(prompt, COUNT), lambda: oracle.greedy(prompt, COUNT))
    assert ours == theirs, (tokenizer.decode(ours), tokenizer.decode(theirs))
    assert len(set(ours)) > 3
