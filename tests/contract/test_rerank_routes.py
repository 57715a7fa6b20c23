"""Reranking over HTTP: a server, a real runner process, a tiny cross encoder."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from puna.server.apis.ranking import probability
from tests.contract.test_embed_routes import Serving
from tests.parity.test_rank import write_qwen3_reranker
from tests.tiny import RANK, write_bert, write_llama

DOCUMENTS = ["the quick brown fox", "hello world", "a fox jumps over the lazy dog", "x"]
ASK: dict[str, Any] = {"model": "ranker", "query": "what does the fox do", "documents": DOCUMENTS}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("server")
    server = Serving(folder)
    server.create("ranker", write_bert(folder / "rank.gguf", seed=3, n_ctx=64, pooling=RANK))
    server.create("judge", write_qwen3_reranker(folder / "judge.gguf"))
    server.create("embedder", write_bert(folder / "bert.gguf", seed=4, n_ctx=64))
    server.create("chat", write_llama(folder / "llama.gguf", n_layers=1, n_embd=64, n_ff=64))
    with server.running():
        yield server


def test_the_best_text_comes_first(live: Serving) -> None:
    reply = live.post("/v1/rerank", ASK).json()
    scores = [result["relevance_score"] for result in reply["results"]]
    assert scores == sorted(scores, reverse=True)
    assert all(0 < score < 1 for score in scores)
    assert sorted(result["index"] for result in reply["results"]) == [0, 1, 2, 3]
    assert (reply["object"], reply["model"]) == ("list", "ranker")
    assert reply["usage"]["prompt_tokens"] == reply["usage"]["total_tokens"] > len(DOCUMENTS) * 5
    assert all(result.keys() == {"index", "relevance_score"} for result in reply["results"])


def test_both_paths_give_the_same_results(live: Serving) -> None:
    native = live.post("/api/rerank", ASK).json()
    assert native["results"] == live.post("/v1/rerank", ASK).json()["results"]
    assert native["total_duration"] >= native["load_duration"] > 0
    assert native["prompt_eval_count"] > 0


def test_fewer_results_with_their_texts(live: Serving) -> None:
    every = live.post("/v1/rerank", ASK).json()["results"]
    best = live.post("/v1/rerank", {**ASK, "top_n": 2, "return_documents": True}).json()["results"]
    assert [result["index"] for result in best] == [result["index"] for result in every[:2]]
    assert all(result["document"] == {"text": DOCUMENTS[result["index"]]} for result in best)
    assert len(live.post("/v1/rerank", {**ASK, "top_n": 99}).json()["results"]) == 4


def test_documents_may_be_objects_and_one_text_scores_alike_in_any_company(live: Serving) -> None:
    objects = [{"text": text, "title": "ignored"} for text in DOCUMENTS]
    as_objects = live.post("/v1/rerank", {**ASK, "documents": objects}).json()["results"]
    assert as_objects == live.post("/v1/rerank", ASK).json()["results"]
    raw = {**ASK, "raw_scores": True}
    by_index = {r["index"]: r["relevance_score"] for r in live.post("/v1/rerank", raw).json()["results"]}
    for index, text in enumerate(DOCUMENTS):
        (alone,) = live.post("/v1/rerank", {**raw, "documents": [text]}).json()["results"]
        assert alone["relevance_score"] == pytest.approx(by_index[index], abs=1e-3)
    probabilities = {r["index"]: r["relevance_score"] for r in live.post("/v1/rerank", ASK).json()["results"]}
    assert probabilities == pytest.approx({index: 1 / (1 + math.exp(-score)) for index, score in by_index.items()})


def test_what_a_decoder_says_is_a_probability_already(live: Serving) -> None:
    ask = {**ASK, "model": "judge"}
    results = live.post("/v1/rerank", ask).json()["results"]
    assert results == live.post("/v1/rerank", {**ask, "raw_scores": True}).json()["results"]
    assert all(0 <= result["relevance_score"] <= 1 for result in results)


@pytest.mark.parametrize("logit", [-1e9, -800.0, 0.0, 3.5, 800.0, 1e300])
def test_any_score_has_a_probability(logit: float) -> None:
    assert 0 <= probability(logit) <= 1
    assert probability(logit) + probability(-logit) == pytest.approx(1)


@pytest.mark.parametrize(
    ("fields", "status", "text"),
    [
        ({"model": ""}, 400, "model is required"),
        ({"model": "nope"}, 404, 'model "nope" not found, try pulling it first'),
        ({"query": ""}, 400, "query is required"),
        ({"documents": []}, 400, "documents must be a list of texts that is not empty"),
        ({"documents": "one"}, 400, "documents must be a list of texts that is not empty"),
        ({"documents": ["a", 5]}, 400, 'documents[1] must be a text, or an object with a "text"'),
        ({"documents": ["a", {"body": "b"}]}, 400, 'documents[1] must be a text, or an object with a "text"'),
        ({"documents": None}, 400, "documents must be a list of texts that is not empty"),
        ({"top_n": 0}, 400, "top_n must be at least 1"),
        ({"model": "chat"}, 501, "this model does not support ranking"),
        ({"model": "embedder"}, 501, "this model does not support ranking: its file has no rank head"),
        ({"documents": ["fox " * 500], "truncate": False}, 400, "the input length exceeds the context length"),
    ],
)
@pytest.mark.parametrize("path", ["/api/rerank", "/v1/rerank"])
def test_what_cannot_be_done_is_said(live: Serving, path: str, fields: dict[str, Any], status: int, text: str) -> None:
    response = live.post(path, {**ASK, **fields})
    assert response.status_code == status
    error = response.json()["error"]
    assert (error["message"] if path.startswith("/v1") else error).startswith(text)


@pytest.mark.parametrize("model", ["ranker", "judge"])
def test_a_ranker_shows_what_it_can_do(live: Serving, model: str) -> None:
    assert live.post("/api/show", {"model": model}).json()["capabilities"] == ["rerank"]
    refused = live.post("/api/generate", {"model": model, "prompt": "x"})
    assert (refused.status_code, refused.json()) == (400, {"error": f'"{model}" does not support generate'})


def test_a_ranker_makes_no_vectors(live: Serving) -> None:
    response = live.post("/api/embed", {"model": "ranker", "input": "x"})
    assert (response.status_code, response.json()) == (501, {"error": "this model does not support embeddings"})


def test_what_was_asked_is_counted(live: Serving) -> None:
    live.post("/api/rerank", ASK)
    live.post("/api/embed", {"model": "embedder", "input": ["a", "b", "c"]})
    live.post("/api/rerank", {**ASK, "model": "embedder"})
    text = live.client.get("/metrics").text
    found = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")}
    assert found['puna_embedding_requests_total{kind="rank",model="ranker:latest",outcome="ok"}'] >= 1
    assert found['puna_embedding_requests_total{kind="embed",model="embedder:latest",outcome="ok"}'] == 1
    assert found['puna_embedding_requests_total{kind="rank",model="embedder:latest",outcome="error"}'] >= 1
    assert found['puna_embedding_texts_total{model="embedder:latest"}'] == 3
    assert found['puna_embedding_tokens_total{model="embedder:latest"}'] > 3
    assert found['puna_embedding_duration_seconds_count{model="ranker:latest"}'] >= 1
