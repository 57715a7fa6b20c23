"""A real model's greedy text, token for token that of libllama; with Puna's own products, but for near ties."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from puna.store.store import Store
from puna.tokenizer.tokenizer import Tokenizer
from tests import needs
from tests.exact import exact_copy
from tests.oracle import Oracle, side_by_side
from tests.packed import error
from tests.puna_engine import PunaEngine
from tests.thorough import first

QUESTIONS = [
    "What is the capital of France? Answer in one short sentence.",
    "Write a short story about a lighthouse keeper and a whale.",
    "Explain how photosynthesis works to a child of ten.",
    "List the planets of the solar system and one fact about each.",
    "Write a Python function that checks whether a word is a palindrome.",
]
COUNT = 256

# Sums in another order turn one rounding of an activation here or there, and from there on all that follow: what two
# engines compute then differs by as much as either differs from exact arithmetic. A choice between two tokens may turn
# where their logits, of which the standard deviation is about 4, are no further apart than this.
COUNT_OF_OWN = 64
NEAR_TIE = 0.4


@pytest.fixture(scope="module")
def path(starter_store: Store) -> Path:
    return Path(starter_store.get("smollm2:135m").model_path)


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Iterator[Tokenizer]:
    opened = Tokenizer(path)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def oracle(path: Path) -> Iterator[Oracle]:
    with Oracle(path, n_ctx=1024) as opened:
        yield opened


def _prompt(tokenizer: Tokenizer, question: str) -> list[int]:
    return list(tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"))


@pytest.fixture(scope="module")
def with_ggml(path: Path) -> Iterator[PunaEngine]:
    with PunaEngine(path, n_ctx=1024, use_kernels=False) as puna:
        yield puna


@pytest.mark.parametrize("question", first(2, QUESTIONS))
def test_greedy_text_is_libllama_s(with_ggml: PunaEngine, oracle: Oracle, tokenizer: Tokenizer, question: str) -> None:
    with_ggml.forget()
    oracle.forget()
    prompt = _prompt(tokenizer, question)
    ours, theirs = side_by_side(lambda: with_ggml.greedy(prompt, COUNT), lambda: oracle.greedy(prompt, COUNT))
    assert ours == theirs, (tokenizer.decode(ours), tokenizer.decode(theirs))
    assert len(set(ours)) > 3


@pytest.fixture(scope="module")
def with_own(path: Path) -> Iterator[PunaEngine]:
    needs.kernels()
    with PunaEngine(path, n_ctx=1024, use_kernels=True) as puna:
        assert puna.backend.instructions, "none of the model's matrices is packed"
        yield puna


@pytest.mark.parametrize("question", QUESTIONS)
def test_own_products_choose_libllama_s_tokens(with_own: PunaEngine, oracle: Oracle, tokenizer: Tokenizer, question: str) -> None:
    """Along libllama's text, each next token is the same or one that was nearly as likely there."""
    with_own.forget()
    oracle.forget()
    prompt = _prompt(tokenizer, question)
    step = (prompt, range(len(prompt)), [0] * len(prompt), [len(prompt) - 1])
    same = 0
    for i in range(COUNT_OF_OWN):
        ours, theirs = with_own.decode(*step)[0], oracle.decode(*step)[0]
        best = int(theirs.argmax())
        gap = float(theirs[best] - theirs[int(ours.argmax())])
        assert gap <= NEAR_TIE, (i, tokenizer.decode([int(ours.argmax()), best]))
        same += gap == 0
        step = ([best], range(len(prompt) + i, len(prompt) + i + 1), [0], [0])
    assert same >= 0.9 * COUNT_OF_OWN


def test_own_products_are_as_close_to_exact_arithmetic(path: Path, tokenizer: Tokenizer, oracle: Oracle, tmp_path: Path) -> None:
    needs.kernels()
    ids = tokenizer.encode("".join(QUESTIONS))[:96]
    step = (ids, range(len(ids)), [0] * len(ids), range(len(ids)))

    def logits(model: Path, *, own: bool) -> NDArray[np.float32]:
        with PunaEngine(model, n_ctx=256, use_kernels=own) as puna:
            return puna.decode(*step).copy()

    oracle.forget()
    theirs = oracle.decode(*step).copy()
    ours = logits(path, own=True)
    exact = logits(exact_copy(path, tmp_path / "exact.gguf"), own=False)
    assert error(ours, exact) <= 1.2 * error(theirs, exact)
    assert error(ours, theirs) <= 1.5 * error(theirs, exact)
