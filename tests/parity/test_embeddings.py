"""Embeddings of whole engines against libllama's, on the same tiny random files."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from puna.errors import ContextOverflow
from puna.runner.engine import Engine
from puna.runner.scheduling.packing import PACKED_TOKENS
from puna.tokenizer.tokenizer import Tokenizer
from puna.wire import EmbeddingReply, EmbeddingRequest, Failed, LoadOptions, LoadRequest
from tests.models.table import EMBEDDERS, ENCODERS
from tests.oracle import Oracle
from tests.patience import PATIENCE_S
from tests.tiny import CORPUS

N_CTX = 128
COSINE = 0.9999
# With quantised weights activations are rounded to 8 bits, and where a batch is cut differently a sum that differs in its
# last bit may round to the next step.
COSINE_QUANTISED = 0.999
TEXTS = [
    "hello world",
    "the quick brown fox jumps over the lazy dog",
    "Why is the SKY blue? Because the air scatters blue light.",
    "x",
    CORPUS[:180],
    "the quick brown fox",
]

CASES = [(name, variant) for name, row in ENCODERS.items() for variant in row.variants]
# Decoders get a batch so small that a text takes several steps.
DECODER_CASES = [(name, variant) for name, row in EMBEDDERS.items() for variant in row.variants]


class Running:
    """An engine with a model, asked from this thread."""

    cosine = COSINE  # between two vectors that should be the same

    def __init__(self, path: Path, new_engine: bool | None = None, **options: Any) -> None:
        self.engine = Engine(path, new_engine)
        given = {"n_ctx": N_CTX, "n_threads": 2, **options}
        assert self.engine.load(LoadRequest(options=LoadOptions(**given))).success
        deadline = time.monotonic() + PATIENCE_S
        while self.engine.health().status != "ready":
            assert time.monotonic() < deadline, self.engine.health()
            time.sleep(0.002)

    def ask(self, inputs: list[Any], **fields: Any) -> EmbeddingReply | Failed:
        replies: list[EmbeddingReply | Failed] = []
        there = threading.Event()

        def emit(reply: EmbeddingReply | Failed) -> None:
            replies.append(reply)
            there.set()

        self.engine.embed(EmbeddingRequest(inputs=inputs, **fields), emit)
        assert there.wait(120)
        return replies[0]

    def embed(self, inputs: list[Any], **fields: Any) -> npt.NDArray[np.float64]:
        reply = self.ask(inputs, **fields)
        assert isinstance(reply, EmbeddingReply), reply
        return np.array(reply.embeddings)


def cosines(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[Any]:
    product: npt.NDArray[Any] = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    return product


def reference(path: Path, texts: list[str]) -> npt.NDArray[np.float32]:
    """Text by text: of a decoder's texts libllama pools only what falls into the last of the pieces it cuts a batch into."""
    tokenizer = Tokenizer(path)
    tokens = [tokenizer.encode(text) for text in texts]
    tokenizer.close()
    vectors = []
    with Oracle(path, n_ctx=N_CTX, embeddings=True) as oracle:
        for text in tokens:
            vectors.append(oracle.embed([text])[0])
            oracle.forget()
    return np.stack(vectors)


def name_of(case: tuple[str, str]) -> str:
    return "-".join(case)


@pytest.fixture(params=CASES, ids=name_of, scope="module")
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Path]]:
    name, variant = request.param
    row = ENCODERS[name]
    folder, options = tmp_path_factory.mktemp("encoder"), {"seed": 5, "n_ctx": N_CTX, **row.variants[variant]}
    path = row.write(folder / "model.gguf", **options)
    norm = row.norm(folder / "norm.gguf", **options) if row.norm else path
    running = Running(path)
    if "q8_0" in variant:
        running.cosine = COSINE_QUANTISED
    yield running, norm
    running.engine.close()


@pytest.fixture(params=DECODER_CASES, ids=name_of, scope="module")
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Path]]:
    name, variant = request.param
    row = EMBEDDERS[name]
    path = row.write(tmp_path_factory.mktemp("decoder") / "model.gguf", seed=5, n_ctx=N_CTX, **row.variants[variant])
    running = Running(path, n_batch=16, n_parallel=3)
    yield running, path
    running.engine.close()


def test_texts_of_one_batch_are_embedded_as_libllama_does(encoder: tuple[Running, Path]) -> None:
    running, path = encoder
    ours, theirs = running.embed(TEXTS, normalize=False), reference(path, TEXTS)
    assert cosines(ours, theirs).min() >= running.cosine
    np.testing.assert_allclose(np.linalg.norm(ours, axis=1), np.linalg.norm(theirs, axis=1), rtol=5e-3)
    # That texts differ at all: the least alike of them are far from the tolerance.
    assert cosines(theirs[:, None], theirs[None]).min() < 0.99


def test_company_changes_nothing(encoder: tuple[Running, Path]) -> None:
    running, _ = encoder
    together = running.embed(TEXTS)
    alone = np.concatenate([running.embed([text]) for text in TEXTS])
    assert cosines(together, alone).min() >= running.cosine
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1.0, atol=1e-6)


def test_more_texts_than_fit_a_batch_keep_their_order(encoder: tuple[Running, Path]) -> None:
    running, _ = encoder
    n_steps = running.engine.health().steps
    many = TEXTS * 30
    vectors = running.embed(many)
    assert cosines(vectors, np.tile(running.embed(TEXTS), (30, 1))).min() >= running.cosine
    reply = running.ask(many)
    assert isinstance(reply, EmbeddingReply)
    n_full = reply.prompt_eval_count / PACKED_TOKENS
    assert running.engine.health().steps - n_steps - 1 <= 2 * (n_full * 1.3 + 1)  # batches are well filled


def test_a_decoder_embeds_causally_also_in_several_steps(decoder: tuple[Running, Path]) -> None:
    running, path = decoder
    ours = running.embed(TEXTS, normalize=False)
    assert cosines(ours, reference(path, TEXTS)).min() >= running.cosine
    np.testing.assert_allclose(running.embed(TEXTS[::-1], normalize=False)[::-1], ours, atol=2e-2)


def test_a_full_context_is_truncated_only_on_request(encoder: tuple[Running, Path]) -> None:
    running, path = encoder
    tokenizer = Tokenizer(path)
    tokens = tokenizer.encode(CORPUS * 3)
    cut = [*tokens[: N_CTX - 1], tokens[-1]]  # the separator stays at the end
    tokenizer.close()
    assert len(tokens) > N_CTX
    assert cosines(running.embed([CORPUS * 3, cut])[0], running.embed([cut])[0]) >= running.cosine
    with pytest.raises(ContextOverflow, match=rf"context length \({len(tokens)} tokens, context {N_CTX}\)"):
        running.ask(["short", CORPUS * 3], truncate=False)


def test_dimensions_are_the_first_ones_of_length_one(encoder: tuple[Running, Path]) -> None:
    running, _ = encoder
    whole, part = running.embed(TEXTS[:2]), running.embed(TEXTS[:2], dimensions=32)
    assert part.shape == (2, 32)
    np.testing.assert_allclose(part, whole[:, :32] / np.linalg.norm(whole[:, :32], axis=1, keepdims=True), atol=1e-6)
    assert running.embed(TEXTS[:1], dimensions=100_000).shape == whole[:1].shape
