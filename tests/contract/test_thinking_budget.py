"""A budget of thinking tokens: what each API calls it, what the runner does about it, and who is told how much was used."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pytest

from puna.runner.engine import Engine
from puna.store.recipe import Recipe
from puna.tokenizer.tokenizer import Tokenizer
from puna.wire import Done, LoadOptions, LoadRequest, Thinking
from tests.contract.test_constrained import WILD, Answer, schema
from tests.contract.test_embed_routes import Serving
from tests.patience import wait_until
from tests.tiny import write_llama
from tests.unit.server.apis.test_native import last_completion
from tests.unit.server.apis.test_openai import events
from tests.unit.server.live import Live

THINKS = "{{ range .Messages }}{{ if .Thinking }}<hm>{{ .Thinking }}</hm>{{ end }}[{{ .Content }}]{{ end }}"
HARMONY = "<|start|>user<|message|>{{ range .Messages }}{{ .Content }}{{ end }}<|end|><|start|>assistant<|channel|>"
HI: Any = [{"role": "user", "content": "Hi"}]
TAGS: dict[str, Any] = {"begin": "<think>", "end": "</think>"}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    server = Live(tmp_path_factory.mktemp("thinking"))
    server.add("thinker", template=THINKS, pieces=["<hm>why</hm>", "because"], thinking_count=7)
    server.add("harmony", template=HARMONY, pieces=["analysis<|message|>why<|end|>"])
    server.add("plain", stop_sequence="END")
    with server.running():
        yield server


def asked(live: Live, model: str = "thinker") -> Any:
    return last_completion(live, model)["thinking"]


def test_each_api_has_a_name_for_the_budget(live: Live) -> None:
    with ollama.Client(live.url) as native:
        native.chat("thinker", HI, options={"think_budget": 11})
        assert asked(live) == {"begin": "<hm>", "end": "</hm>", "ending": "", "is_open": False, "repeats": False, "budget": 11}
        native.generate("thinker", "Hi", options={"think_budget": 12})
        assert asked(live)["budget"] == 12
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="-") as client:
        for number, extra in enumerate([{"reasoning": {"max_tokens": 13}}, {"thinking_token_budget": 14}], 13):
            reply = client.chat.completions.create(model="thinker", messages=HI, extra_body=extra)
            assert asked(live)["budget"] == number
        assert reply.usage is not None
        assert reply.usage.completion_tokens_details is not None
        assert reply.usage.completion_tokens_details.reasoning_tokens == 7
        answer = client.responses.create(model="thinker", input="Hi", extra_body={"reasoning": {"max_tokens": 15}})
        assert asked(live)["budget"] == 15
        assert answer.usage is not None
        assert answer.usage.output_tokens_details.reasoning_tokens == 7
    with anthropic.Anthropic(base_url=live.url, api_key="-") as claude:
        claude.messages.create(model="thinker", max_tokens=2000, messages=HI, thinking={"type": "enabled", "budget_tokens": 1024})
        assert asked(live)["budget"] == 1024
    live.post("/api/chat", {"model": "thinker", "messages": HI, "stream": False})
    assert asked(live)["budget"] == -1


def test_streamed_usage_tells_the_thoughts_too(live: Live) -> None:
    body = {"model": "thinker", "messages": HI, "stream": True, "stream_options": {"include_usage": True}}
    *_, usage, _ = events(live.post("/v1/chat/completions", body))
    assert usage["usage"]["completion_tokens_details"] == {"reasoning_tokens": 7}


def test_of_channels_the_thinking_one_is_limited_and_the_final_one_follows(live: Live) -> None:
    live.post("/api/chat", {"model": "harmony", "messages": HI, "stream": False, "options": {"think_budget": 5}})
    sent = asked(live, "harmony")
    assert (sent["begin"], sent["end"], sent["repeats"]) == ("<|channel|>analysis<|message|>", "<|end|>", True)
    assert sent["ending"] == "<|end|><|start|>assistant<|channel|>final<|message|>"


def test_a_model_that_does_not_think_has_nothing_to_limit(live: Live) -> None:
    live.post("/api/chat", {"model": "plain", "messages": HI, "stream": False, "options": {"think_budget": 5}})
    assert asked(live, "plain") is None
    live.post("/api/chat", {"model": "thinker", "messages": HI, "stream": False, "think": False})
    assert asked(live) is None


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        ("/v1/chat/completions", {"reasoning": {"max_tokens": -1}}, "reasoning.max_tokens"),
        ("/v1/chat/completions", {"thinking_token_budget": -1}, "thinking_token_budget"),
        ("/v1/messages", {"max_tokens": 5, "thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
    ],
)
def test_a_negative_budget_is_refused(live: Live, path: str, fields: dict[str, Any], field: str) -> None:
    response = live.post(path, {"model": "thinker", "messages": HI, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(field)


def test_anthropics_clients_hear_which_stop_sequence_it_was(live: Live) -> None:
    with anthropic.Anthropic(base_url=live.url, api_key="-") as client:
        ask: Any = {"model": "plain", "max_tokens": 50, "messages": HI}
        reply = client.messages.create(**ask, stop_sequences=["STOP", "END"])
        assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "END")
        with client.messages.stream(**ask, stop_sequences=["END"]) as stream:
            final = stream.get_final_message()
        assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", "END")
        own = client.messages.create(**ask, stop_sequences=["other"])  # the model's own way to end a turn
        assert (own.stop_reason, own.stop_sequence) == ("end_turn", None)


# The runner's part, with a model whose weights are random: it would think for ever.


@pytest.fixture(scope="module", params=["bpe", "spm"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "model.gguf"
    return write_llama(path, seed=3, n_layers=1, n_embd=64, n_ff=64, n_ctx=4096, vocab=request.param)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    engine = Engine(model)
    assert engine.load(LoadRequest(options=LoadOptions(n_ctx=4096, n_parallel=4, n_threads=1))).success
    wait_until(lambda: engine.health().status == "ready")
    yield engine
    engine.close()


@pytest.mark.parametrize("budget", [0, 1, 30])
def test_the_answer_follows_the_thought(engine: Engine, budget: int) -> None:
    thoughts = Thinking(**TAGS, is_open=True, budget=budget)
    answer = Answer(engine, thinking=thoughts, n_predict=budget + 60, ignore_eos=True, sampling=WILD, logprobs=True)
    assert answer.done().reason == "length"
    thought, tag, rest = answer.text.partition("</think>")
    assert tag
    assert rest
    # A character that was begun is finished before the tag is written.
    assert budget <= answer.done().thinking_count <= budget + 3
    assert bool(thought.strip()) == bool(budget)  # SentencePiece puts a space before the tag


def test_a_grammar_and_a_budget_together(engine: Engine) -> None:
    wanted = schema({"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"], "additionalProperties": False})
    grammar = type(wanted)(kind=wanted.kind, text=wanted.text, thinking_begin="", thinking_end="</think>")
    thoughts = Thinking(**TAGS, is_open=True, budget=12)
    answers = [
        Answer(engine, prompt, thinking=thoughts, grammar=grammar, n_predict=200, sampling=WILD) for prompt in ("a", "the sea")
    ]
    for answer in answers:
        assert answer.done().reason == "stop"
        _, tag, rest = answer.text.partition("</think>")
        assert tag
        assert json.loads(rest)["n"] in (1, 22)
        assert answer.done().thinking_count <= 15


def test_the_end_is_told_with_the_stop_sequence(engine: Engine, model: Path) -> None:
    tokenizer = Tokenizer(model)
    free = Answer(engine, n_predict=40, ignore_eos=True, return_tokens=True)
    tokens = free.done().tokens[-40:]
    assert not set(tokens) & tokenizer.end_tokens
    tokenizer.close()
    stop = free.text[5:8]
    stopped = Answer(engine, n_predict=40, ignore_eos=True, stop=["never said", stop])
    assert isinstance(stopped.done(), Done)
    assert (stopped.done().reason, stopped.done().stop_sequence) == ("stop", stop)
    assert stopped.text == free.text[: free.text.index(stop)]


def test_the_whole_way(tmp_path: Path) -> None:
    """A server, a real runner, a template that has begun the thought; the budget is the model's, then the request's."""
    server = Serving(tmp_path)
    file = write_llama(tmp_path / "model.gguf", seed=3, n_layers=1, n_embd=64, n_ff=64)
    template = "{{ range .Messages }}{{ if .Thinking }}<think>{{ .Thinking }}</think>{{ end }}[{{ .Content }}]{{ end }}<think>"
    parameters = {"think_budget": 9, "num_predict": 60, "ignore_eos": True, "num_ctx": 256}
    blob = server.store.blobs.import_file(file)
    server.store.create("thinker", Recipe(files={"model.gguf": blob.digest}, template=template, parameters=parameters))
    with server.running(), openai.OpenAI(base_url=f"{server.url}/v1", api_key="-") as client:
        for extra, budget in (({}, 9), ({"reasoning": {"max_tokens": 21}}, 21)):
            reply = client.chat.completions.create(model="thinker", messages=HI, extra_body=extra)
            said = reply.choices[0].message
            assert said.content
            assert said.model_dump()["reasoning"]
            assert reply.usage is not None
            assert reply.usage.completion_tokens == 60
            assert reply.usage.completion_tokens_details is not None
            assert budget <= (reply.usage.completion_tokens_details.reasoning_tokens or 0) <= budget + 3
        unlimited = server.post(
            "/api/chat", {"model": "thinker", "messages": HI, "stream": False, "options": {"think_budget": -1}}
        )
        assert unlimited.json()["message"]["content"] == ""
