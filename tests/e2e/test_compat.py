"""Models that only libllama runs, the whole way: a server process, real runners, the same requests as ever."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from puna.tokenizer.tokenizer import Tokenizer
from tests.e2e.test_first_light import GREEDY, N_CTX, Server, assert_who_leaves_frees_the_runner, serving
from tests.models.gemma import GEMMA
from tests.oracle import Oracle
from tests.patience import wait_until
from tests.tiny import CORPUS, RANK, write_bert, write_llama
from tests.tiny_others import OTHERS
from tests.whole import with_tensors

FORCED = {"OLLAMA_NEW_ENGINE": "0"}
RAW = {"raw": True, "stream": False}


@pytest.fixture(scope="module")
def forced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server"), **FORCED) as running:
        yield running


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", dtype="f32", n_ctx=N_CTX))


@pytest.fixture(scope="module")
def automatic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server")) as running:
        yield running


def expected(path: Path, prompt: str, count: int) -> str:
    """What libllama, driven by hand, says to a prompt: the likeliest tokens but those that end an answer."""
    tokenizer = Tokenizer(path)
    ends = sorted(tokenizer.end_tokens)
    tokens = tokenizer.encode(prompt)
    n_prompt = len(tokens)
    with Oracle(path, n_ctx=1024) as oracle:
        new = tokens
        while len(tokens) < n_prompt + count:
            row = oracle.decode(new, range(len(tokens) - len(new), len(tokens)), [0] * len(new), [len(new) - 1])[0]
            row[ends] = -np.inf
            new = [int(row.argmax())]
            tokens = tokens + new
    text = tokenizer.decode(tokens[n_prompt:], special=False)
    tokenizer.close()
    return text


def generate(server: Server, model: str, prompt: str, **fields: Any) -> dict[str, Any]:
    options = {**GREEDY, **fields.pop("options", {})}
    response = server.client.post("/api/generate", json={"model": model, "prompt": prompt, **RAW, "options": options, **fields})
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def test_show_names_the_engine_and_the_reason(forced: Server, automatic: Server, llama: str, tmp_path: Path) -> None:
    other = str(OTHERS["gpt2"](tmp_path / "gpt2.gguf"))

    def engine(server: Server, model: str) -> tuple[str, str]:
        reply = server.client.post("/api/show", json={"model": model}).json()
        return reply["engine"], reply["engine_reason"]

    assert engine(forced, llama) == ("compat", "OLLAMA_NEW_ENGINE=0")
    assert engine(automatic, llama) == ("puna", "Puna's engine supports the architecture llama")
    before = engine(automatic, other)
    assert before == ("compat", "Puna's engine does not support the architecture gpt2")
    generate(automatic, other, "hello")
    assert engine(automatic, other) == before  # loaded, the runner says so


def test_show_names_what_puna_would_pass_over(automatic: Server, tmp_path: Path) -> None:
    """Of an architecture that Puna runs: the file decides, and is read before it is loaded."""
    plain = GEMMA.write(tmp_path / "plain.gguf", seed=5)
    model = str(with_tensors(plain, tmp_path / "m.gguf", {"blk.0.ffn_up.scale": np.full(1, 2, np.float32)}))

    def engine() -> tuple[str, str]:
        reply = automatic.client.post("/api/show", json={"model": model}).json()
        return reply["engine"], reply["engine_reason"]

    before = engine()
    assert before == ("compat", "tensor blk.0.ffn_up.scale, which llama.cpp loads and leaves out in gemma")
    generate(automatic, model, "hello")
    assert engine() == before


@pytest.mark.parametrize("name", OTHERS)
def test_an_architecture_that_puna_lacks_says_what_libllama_says(automatic: Server, tmp_path: Path, name: str) -> None:
    path = OTHERS[name](tmp_path / f"{name}.gguf", seed=4)
    prompt = "the quick brown fox jumps over"
    reply = generate(automatic, str(path), prompt)
    assert reply["eval_count"] == 48
    assert reply["response"] == expected(path, prompt, 48)


def test_chat_and_streaming(forced: Server, llama: str) -> None:
    whole = forced.chat(llama, "why is the sky blue?")
    assert (whole["done_reason"], whole["eval_count"]) == ("length", 48)
    messages = [{"role": "user", "content": "why is the sky blue?"}]
    with forced.client.stream("POST", "/api/chat", json={"model": llama, "messages": messages, "options": GREEDY}) as response:
        lines = [json.loads(line) for line in response.iter_lines()]
    assert "".join(line["message"]["content"] for line in lines) == whole["message"]["content"]


def test_both_engines_say_the_same(forced: Server, automatic: Server, llama: str) -> None:
    question = "once upon a time there was a little girl"
    assert forced.chat(llama, question)["message"]["content"] == automatic.chat(llama, question)["message"]["content"]


def farthest_from_the_best(path: Path, reply: dict[str, Any]) -> float:
    """How much likelier, in logarithms, libllama finds another token than one of the answer, at the worst of them.

    Texts cannot be compared: what is computed beside others differs in the fourth digit, and one choice of a random model
    that turns on it makes everything after it another text.
    """
    tokens, n_prompt = reply["context"], reply["prompt_eval_count"]
    said = range(n_prompt, len(tokens))
    tokenizer = Tokenizer(path)
    with Oracle(path, n_ctx=1024) as oracle:
        logits = oracle.decode(tokens, range(len(tokens)), [0] * len(tokens), [p - 1 for p in said])
    logits[:, sorted(tokenizer.end_tokens)] = -np.inf  # never chosen here
    tokenizer.close()
    return float((logits.max(1) - logits[np.arange(len(said)), tokens[n_prompt:]]).max())


def test_four_at_once_answer_what_libllama_says_to_each(forced: Server, llama: str) -> None:
    def ask(number: int) -> dict[str, Any]:
        prompt = f"{number} foxes run to the river " * (number + 1)
        return generate(forced, llama, prompt, raw=False)

    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(ask, range(4)))
    assert max(farthest_from_the_best(Path(llama), reply) for reply in replies) < 0.05
    assert len({reply["response"] for reply in replies}) == 4
    assert all(len(reply["context"]) >= reply["prompt_eval_count"] + 40 for reply in replies)


def test_a_prompt_that_was_computed_is_not_computed_again(forced: Server, tmp_path: Path) -> None:
    path = str(write_llama(tmp_path / "tiny.gguf", seed=2, n_ctx=2048))
    long = CORPUS[:600]
    first, again = generate(forced, path, long), generate(forced, path, long)
    assert again["response"] == first["response"]
    assert first.get("cached_count", 0) == 0
    assert again["cached_count"] == again["prompt_eval_count"] - 1
    follow_up = generate(forced, path, long + " and then")
    assert follow_up["cached_count"] >= again["prompt_eval_count"] - 2  # the last word may be cut into other tokens
    with ThreadPoolExecutor(4) as pool:  # they wait for the first to compute what they share, and then fork it
        together = list(pool.map(lambda end: generate(forced, path, f"hello {long} {end}"), ["one", "two", "three", "four"]))
    shared = together[0]["prompt_eval_count"] - 20
    assert sum(reply.get("cached_count", 0) >= shared for reply in together) >= 3


def test_more_than_the_context_shifts(forced: Server, llama: str) -> None:
    reply = generate(forced, llama, CORPUS[:400], options={"num_ctx": 256, "num_predict": 300})
    assert (reply["done_reason"], reply["eval_count"]) == ("length", 300)


@pytest.mark.parametrize("name", ["mamba", "jamba"])
def test_a_recurrent_model_serves_several_conversations_and_goes_on_with_them(tmp_path: Path, name: str) -> None:
    path = OTHERS[name](tmp_path / f"{name}.gguf", seed=6)
    prompts = ["the sea", "once upon a time there was", "one two three four five", "the fox runs to the river"]
    with serving(tmp_path) as server:
        alone = [generate(server, str(path), prompt)["response"] for prompt in prompts]
        with ThreadPoolExecutor(4) as pool:
            at_once = list(pool.map(lambda prompt: generate(server, str(path), prompt)["response"], prompts))
        assert at_once == alone
        assert alone == [expected(path, prompt, 48) for prompt in prompts]
        # A context that is full begins anew with what is kept, computed again.
        assert generate(server, str(path), CORPUS[:200], options={"num_ctx": 128, "num_predict": 150})["eval_count"] == 150


def test_a_client_that_leaves_frees_the_runner(forced: Server, llama: str) -> None:
    assert_who_leaves_frees_the_runner(forced, llama)


EMBEDDERS: dict[str, dict[str, Any]] = {
    "bert-mean": {"pooling": 1},
    "bert-cls": {"pooling": 2},
    "bert-last": {"pooling": 3},
    "llama-mean": {"metadata": {"llama.pooling_type": 1}},
    "llama-last": {"metadata": {"llama.pooling_type": 3}},
}
TEXTS = ["hello world", "the quick brown fox jumps over the lazy dog", "x", CORPUS[:180]]


@pytest.mark.parametrize("name", EMBEDDERS)
def test_embeddings_are_libllamas_own(forced: Server, tmp_path: Path, name: str) -> None:
    write = write_bert if name.startswith("bert") else write_llama
    path = write(tmp_path / "model.gguf", **EMBEDDERS[name])
    body = {"model": str(path), "input": TEXTS, "options": {"num_ctx": 128, "num_batch": 32}}
    reply = forced.client.post("/api/embed", json=body)
    assert reply.status_code == 200, reply.text
    ours = np.array(reply.json()["embeddings"])
    tokenizer = Tokenizer(path)
    theirs = np.empty_like(ours)
    with Oracle(path, n_ctx=128, embeddings=True) as oracle:
        for i, text in enumerate(TEXTS):  # libllama takes the mean of what it computes at once, which may be part of a text
            theirs[i] = oracle.embed([tokenizer.encode(text)])[0]
            oracle.forget(0)
    tokenizer.close()
    theirs /= np.linalg.norm(theirs, axis=1, keepdims=True)
    assert (ours * theirs).sum(axis=1).min() > 0.9999


def test_scores_are_those_of_both_engines(forced: Server, automatic: Server, tmp_path: Path) -> None:
    path = str(write_bert(tmp_path / "ranker.gguf", pooling=RANK))
    body = {"model": path, "query": "why is the sky blue", "documents": TEXTS}
    replies = [server.client.post("/api/rerank", json=body) for server in (forced, automatic)]
    assert [reply.status_code for reply in replies] == [200, 200], replies[0].text
    ours, theirs = ([r["relevance_score"] for r in reply.json()["results"]] for reply in replies)
    assert np.allclose(ours, theirs, atol=1e-3)


def test_a_model_that_goes_is_gone(forced: Server, llama: str) -> None:
    forced.chat(llama, "hello")
    (model,) = [m for m in forced.client.get("/api/ps").json()["models"] if m["name"] == llama]
    assert model["size"] > 0
    before = {runner.pid for runner in forced.runners()}
    forced.client.post("/api/generate", json={"model": llama, "keep_alive": 0})
    wait_until(lambda: len(before - {runner.pid for runner in forced.runners()}) == 1)
