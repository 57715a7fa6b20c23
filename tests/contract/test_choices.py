"""Several answers to one prompt, with the official client: their order in a stream, what is counted, what is computed.
Then options of sampling over a real runner, as both official clients send them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ollama
import openai
import pytest

from puna.store.recipe import Recipe
from tests.contract.test_embed_routes import Serving
from tests.patience import PATIENCE_S, wait_until
from tests.tiny import write_llama
from tests.unit.server.live import Live

HI: Any = [{"role": "user", "content": "Hi"}]
LONG: Any = [{"role": "user", "content": "once upon a time there was a fox who knew many things " * 20}]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    server = Live(tmp_path_factory.mktemp("scripted"))
    server.add("hello", thinking_count=2, cached_count=1)
    server.add("late", fail_at_piece=1)
    server.add("slow", n_pieces=10_000, piece_delay_s=0.005)
    with server.running():
        yield server


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("real")
    server = Serving(folder)
    file = write_llama(folder / "llama.gguf", seed=3, n_layers=2, n_embd=64, n_ff=64)
    server.store.create("chat", Recipe(files={"model.gguf": server.store.blobs.import_file(file).digest}))
    with server.running():
        yield server


def client_of(server: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0, timeout=PATIENCE_S)


@pytest.fixture
def client(scripted: Live) -> Iterator[openai.OpenAI]:
    with client_of(scripted) as client:
        yield client


def asked(server: Live, name: str) -> list[dict[str, Any]]:
    path: Path | None = server.store.get(name).model_path
    assert path is not None
    return server.completions(server.scripts[path])


def test_choices_are_numbered_and_the_prompt_counts_once(client: openai.OpenAI) -> None:
    one = client.chat.completions.create(model="hello", messages=HI).usage
    whole = client.chat.completions.create(model="hello", messages=HI, n=3)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert [choice.message.content for choice in whole.choices] == ["Hello world"] * 3
    assert [choice.finish_reason for choice in whole.choices] == ["stop"] * 3
    usage = whole.usage
    assert one is not None
    assert usage is not None
    assert usage.prompt_tokens == one.prompt_tokens
    assert usage.completion_tokens == 3 * one.completion_tokens
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == 6
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 1


def test_streamed_choices_are_told_apart_by_their_index(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(model="hello", messages=HI, n=3, stream=True, stream_options={"include_usage": True})
    )
    *chunks, last = chunks
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 12
    assert all(len(chunk.choices) == 1 for chunk in chunks)
    by_index: dict[int, list[Any]] = defaultdict(list)
    for chunk in chunks:
        by_index[chunk.choices[0].index].append(chunk.choices[0])
    assert sorted(by_index) == [0, 1, 2]
    for own in by_index.values():
        assert "".join(choice.delta.content or "" for choice in own) == "Hello world"
        assert [choice.delta.role for choice in own] == ["assistant"] + [None] * (len(own) - 1)
        assert [choice.finish_reason for choice in own] == [None] * (len(own) - 1) + ["stop"]


def test_plain_completions_have_choices_too(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="hello", prompt="Hi", n=2, logprobs=1)
    assert [(choice.index, choice.text) for choice in whole.choices] == [(0, "Hello world"), (1, "Hello world")]
    texts: dict[int, str] = defaultdict(str)
    offsets: dict[int, list[int]] = defaultdict(list)
    for chunk in client.completions.create(model="hello", prompt="Hi", n=2, stream=True, logprobs=1):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        offsets[choice.index] += (choice.logprobs and choice.logprobs.text_offset) or []
    assert texts == {0: "Hello world", 1: "Hello world"}
    assert offsets == {0: [0, 3, 5], 1: [0, 3, 5]}


@pytest.mark.parametrize("n", [0, -1, 129, 1.5])
def test_how_many_there_may_be(client: openai.OpenAI, n: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="n"):
        client.chat.completions.create(model="hello", messages=HI, n=n)
    with pytest.raises(openai.BadRequestError, match="n"):
        client.completions.create(model="hello", prompt="Hi", n=n)


@pytest.mark.parametrize(
    ("seed", "seeds"),
    [(7, [7, 8, 9]), (None, [-1, -1, -1]), (-3, [-3, -2, 0]), (2**63 - 2, [2**63 - 2, 2**63 - 1, -(2**63)])],
)
def test_each_choice_has_a_seed_of_its_own(scripted: Live, client: openai.OpenAI, seed: int | None, seeds: list[int]) -> None:
    client.chat.completions.create(model="hello", messages=HI, n=3, seed=seed)
    assert sorted(request["sampling"]["seed"] for request in asked(scripted, "hello")[-3:]) == sorted(seeds)


def test_an_error_of_one_choice_is_the_requests(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="the sky fell"):
        client.chat.completions.create(model="late", messages=HI, n=3)
    with pytest.raises(openai.APIError, match="the sky fell"):
        list(client.chat.completions.create(model="late", messages=HI, n=3, stream=True))


def test_who_leaves_cancels_all_choices(scripted: Live, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="slow", messages=HI, n=5, stream=True)
    seen: set[int] = set()
    for chunk in stream:
        seen.add(chunk.choices[0].index)
        if len(seen) == 5:
            break
    stream.close()
    path = scripted.store.get("slow").model_path
    assert path is not None
    wait_until(lambda: sum(event[0] == "cancelled" for event in scripted.events(scripted.scripts[path])) == 5)


def metric(server: Live, name: str) -> float:
    lines = server.client.get("/metrics").text.splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f'{name}{{model="chat')), 0.0)


@pytest.mark.parametrize("n", [4, 9])  # as many as there are places, and more
def test_the_prompt_is_computed_once(real: Serving, n: int) -> None:
    messages: Any = [{"role": "user", "content": f"{n} {LONG[0]['content']}"}]
    before = [metric(real, f"puna_prompt_tokens{kind}_total") for kind in ("", "_cached")]
    with client_of(real) as client:
        whole = client.chat.completions.create(
            model="chat", messages=messages, n=n, max_tokens=8, temperature=2.0, extra_body={"ignore_eos": True, "top_k": 0}
        )
    usage = whole.usage
    assert usage is not None
    assert usage.prompt_tokens > 200
    assert usage.completion_tokens == 8 * n
    assert usage.prompt_tokens_details is None or (usage.prompt_tokens_details.cached_tokens or 0) < 20
    after = [metric(real, f"puna_prompt_tokens{kind}_total") for kind in ("", "_cached")]
    n_read, n_cached = (b - a for a, b in zip(before, after, strict=True))
    assert n_read == n * usage.prompt_tokens
    assert n_read - n_cached <= usage.prompt_tokens + 2 * n  # the last token of each is computed for its logits
    assert len({choice.message.content for choice in whole.choices}) == n


def test_biased_choices_over_the_real_thing(real: Serving) -> None:
    """A bias of 100 decides, one of -100 forbids, and an answer has its least length."""
    with client_of(real) as client:
        whole: Any = client.chat.completions.create(
            model="chat", messages=HI, n=2, max_tokens=12, temperature=0, logit_bias={"65": 100}, extra_body={"min_tokens": 12}
        )
        first, second = (choice.message.content for choice in whole.choices)
        assert first == second
        assert len(set(first)) == 1
        forbidden: Any = client.chat.completions.create(
            model="chat", messages=HI, max_tokens=12, temperature=0, logit_bias={"65": -100}, logprobs=True
        )
        assert first[0] not in forbidden.choices[0].message.content
        for bias, says in (({"99999999": 1}, "not in the vocabulary"), ({"1": 101}, "between -100 and 100")):
            with pytest.raises(openai.BadRequestError, match=says):
                client.chat.completions.create(model="chat", messages=HI, logit_bias=bias)
        text = client.completions.create(model="chat", prompt="x", max_tokens=5, logit_bias={"65": 100}, temperature=0)
        assert set(text.choices[0].text) == set(first)


def test_options_of_sampling_over_the_real_thing(real: Serving) -> None:
    """With a bias the model would write one letter for ever: what each option does about that can be told from the text."""
    only: dict[str, Any] = {"logit_bias": {"65": 60, "66": 40}, "num_predict": 12, "ignore_eos": True, "seed": 1}
    with ollama.Client(real.url) as client:

        def text(**options: Any) -> str:
            return client.generate("chat", "Hi", options={**only, **options}).response or ""

        plain = text(temperature=0)
        assert len(set(plain)) == 1
        assert text(temperature=5.0) == plain, "the cuts come first by default, and leave one token"
        assert text(temperature=50.0, samplers=["temperature"]) != plain
        assert text(mirostat=2, mirostat_tau=20.0, temperature=20.0) != plain
        assert text(temperature=0, dry_multiplier=100.0, dry_base=1.0) != plain
        assert text(temperature=0, dry_multiplier=100.0, dry_base=1.0, dry_sequence_breakers=[plain[0]]) == plain
        assert text(xtc_probability=1.0, xtc_threshold=0.0, top_k=2, top_p=1.0) == len(plain) * text(logit_bias={"66": 60})[0]
        assert text(top_n_sigma=1.0, top_k=0, top_p=1.0) == plain
