"""No field of a request and no option is passed over in silence: each changes what the runner is told or what is answered,
or is refused, or is named in the answer's warnings. What asks for nothing is listed with its reason."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from pydantic import BaseModel

from puna.api import anthropic, embed, generate, openai, rerank, responses
from puna.api.options import Options
from puna.llm.load import load_requirements
from puna.sample.choice import distribution, sample_batch
from puna.sample.sampler import Sampler
from puna.settings import Settings
from puna.wire import SamplingOptions
from tests.contract.test_embed_routes import Serving
from tests.tiny import write_bert
from tests.unit.server.live import Live

TEMPLATE = (
    "{{ range .Messages }}{{ .Role }}{{ if .Thinking }}<hm>{{ .Thinking }}</hm>{{ end }}{{ .Content }}{{ end }}"
    "{{ .Tools }}{{ .Think }}{{ .ThinkLevel }}{{ .Suffix }}"
)
HI: Any = [{"role": "user", "content": "Hi"}]
TOOL: Any = {"name": "look", "description": "d", "parameters": {"type": "object", "properties": {}}}
FUNCTION: Any = {"type": "function", "function": TOOL}
PICTURE = "iVBORw0KGgo="

# Of every API: where it is, a request, and for each of its fields another value, with what else must be said for it to matter.
Sample = tuple[Any, dict[str, Any]]


def s(value: Any, **beside: Any) -> Sample:
    return value, beside


COMMON: dict[str, Sample] = {
    "model": s("other"),
    "stream": s(True),
    "format": s("json"),
    "keep_alive": s(77),
    "options": s({"top_k": 3}),
    "think": s("high"),
    "truncate": s(False),
    "shift": s(False),
    "logprobs": s(True),
    "top_logprobs": s(2, logprobs=True),
    "regex": s("a+"),
    "lark": s('start: "a"'),
    "debug_render_only": s(True),
    "projector": s("/tmp/eyes.gguf"),
}
TURNS: dict[str, Sample] = {
    "add_generation_prompt": s(False),
    "continue_final_message": s(True),
}
OPENAI: dict[str, Sample] = {
    "model": s("other"),
    "stream": s(True),
    "stream_options": s({"include_usage": True}, stream=True),
    "max_tokens": s(2),
    "temperature": s(0.3),
    "top_p": s(0.3),
    "seed": s(5),
    "frequency_penalty": s(0.5),
    "presence_penalty": s(0.5),
    "stop": s(["x"]),
    "n": s(2),
    "logit_bias": s({"5": 3}),
    "min_tokens": s(1),
    "ignore_eos": s(True),
    "regex": s("a+"),
    "lark": s('start: "a"'),
}
SAMPLES: dict[str, tuple[type[BaseModel], dict[str, Any], dict[str, Sample]]] = {
    "/api/generate": (
        generate.GenerateRequest,
        {"model": "plain", "prompt": "Hi", "stream": False},
        COMMON
        | {
            "prompt": s("Ho"),
            "suffix": s("end"),
            "system": s("Be."),
            "template": s("{{ .Prompt }}!"),
            "context": s([1, 2]),
            "raw": s(True),
            "images": s([PICTURE]),
        },
    ),
    "/api/chat": (
        generate.ChatRequest,
        {"model": "plain", "messages": HI, "stream": False},
        COMMON | TURNS | {"messages": s([*HI, *HI]), "tools": s([FUNCTION])},
    ),
    "/v1/chat/completions": (
        openai.ChatCompletionRequest,
        {"model": "plain", "messages": HI},
        OPENAI
        | TURNS
        | {
            "messages": s([*HI, *HI]),
            "max_completion_tokens": s(2),
            "tools": s([FUNCTION]),
            "tool_choice": s("required", tools=[FUNCTION]),
            "response_format": s({"type": "json_object"}),
            "reasoning": s({"max_tokens": 5}),
            "reasoning_effort": s("none"),
            "thinking_token_budget": s(5),
            "logprobs": s(True),
            "top_logprobs": s(2, logprobs=True),
        },
    ),
    "/v1/completions": (
        openai.CompletionRequest,
        {"model": "plain", "prompt": "Hi"},
        OPENAI | {"prompt": s("Ho"), "suffix": s("end"), "logprobs": s(1)},
    ),
    "/v1/responses": (
        responses.ResponsesRequest,
        {"model": "plain", "input": "Hi"},
        {
            "model": s("other"),
            "input": s("Ho"),
            "instructions": s("Be."),
            "max_output_tokens": s(2),
            "temperature": s(0.3),
            "top_p": s(0.3),
            "reasoning": s({"max_tokens": 5}),
            "text": s({"format": {"type": "json_object"}}),
            "tools": s([{"type": "function", **TOOL}]),
            "tool_choice": s("required", tools=[{"type": "function", **TOOL}]),
            "stream": s(True),
            "truncation": s("disabled"),
            "background": s(True),
            "previous_response_id": s("resp_1"),
        },
    ),
    "/v1/messages": (
        anthropic.MessagesRequest,
        {"model": "plain", "messages": HI, "max_tokens": 50},
        {
            "model": s("other"),
            "messages": s([*HI, *HI]),
            "system": s("Be."),
            "tools": s([{"name": "look", "input_schema": {"type": "object"}}]),
            "tool_choice": s({"type": "any"}, tools=[{"name": "look", "input_schema": {"type": "object"}}]),
            "thinking": s({"type": "disabled"}),
            "output_config": s({"effort": "high"}),
            "max_tokens": s(2),
            "stream": s(True),
            "temperature": s(0.3),
            "top_p": s(0.3),
            "top_k": s(3),
            "stop_sequences": s(["x"]),
        },
    ),
}
PASSING = {"created_at", "created", "completed_at", "total_duration", "load_duration"}
FIELDS = [(path, name) for path, (_, _, fields) in SAMPLES.items() for name in fields]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    server = Live(tmp_path_factory.mktemp("fields"))
    server.add("plain", template=TEMPLATE)
    server.add("other", template=TEMPLATE, pieces=["another"])
    server.add("thoughtless")
    with server.running():
        yield server


def lasting(value: Any) -> Any:
    """Without what differs each time."""
    if isinstance(value, dict):
        return {k: lasting(v) for k, v in value.items() if k not in PASSING and not (k == "id" and isinstance(v, str))}
    return [lasting(item) for item in value] if isinstance(value, list) else value


def seen(live: Live, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """What a request brings about: the answer, what the runners were told, how long the model stays."""
    before = {name: len(live.completions(script)) for name, script in live.scripts.items()}
    reply = live.post(path, body)
    told = [lasting(live.completions(script)[before[name] :]) for name, script in live.scripts.items()]
    for request in (request for requests in told for request in requests):
        del request["request_id"]
    stays = [loaded.keep_alive for loaded in live.scheduler.models.values() if loaded.model.model_path == plain(live)]
    is_json = reply.headers["content-type"].startswith("application/json")
    answer = lasting(reply.json()) if is_json else reply.text.count("usage")
    return {"status": reply.status_code, "answer": answer, "is_json": is_json, "told": told, "stays": stays}


def plain(live: Live) -> Path | None:
    return live.store.get("plain").model_path


@pytest.mark.parametrize("path", SAMPLES)
def test_every_field_has_a_sample(path: str) -> None:
    kind, _, samples = SAMPLES[path]
    assert set(kind.model_fields) == set(samples)


@pytest.mark.parametrize(("path", "name"), FIELDS)
def test_a_field_is_done_or_refused(live: Live, path: str, name: str) -> None:
    kind, body, samples = SAMPLES[path]
    value, beside = samples[name]
    key = kind.model_fields[name].alias or name
    without = {**body, **beside}
    live.post("/api/generate", {"model": "plain", "keep_alive": 300})
    first, second = seen(live, path, without), seen(live, path, {**without, key: value})
    assert first["status"] == 200
    assert first != second, f"{key} has been passed over"


@pytest.mark.parametrize("path", SAMPLES)
def test_a_field_that_nobody_knows_is_named(live: Live, path: str, caplog: pytest.LogCaptureFixture) -> None:
    _, body, _ = SAMPLES[path]
    with caplog.at_level(logging.WARNING):
        whole = live.post(path, {**body, "colour": "red", "stream": False}).json()
        streamed = live.post(path, {**body, "colour": "red", "stream": True}).text
        plain_reply = live.post(path, {**body, "stream": False}).json()
    assert whole["warnings"] == ['field "colour" is not supported, and has no effect']
    assert json.dumps(whole["warnings"][0]) in streamed
    assert "warnings" not in plain_reply
    assert caplog.text.count('field "colour" is not supported') == 2


@pytest.mark.parametrize(
    ("path", "silent", "told"),
    [
        (
            "/v1/chat/completions",
            {"user": "u", "metadata": {"a": "b"}, "store": False, "parallel_tool_calls": True, "service_tier": "auto"},
            {"store": True, "parallel_tool_calls": False, "functions": [], "audio": {}, "modalities": ["audio"], "num_ctx": 64},
        ),
        ("/v1/completions", {"best_of": 1, "echo": False, "user": "u"}, {"best_of": 3, "echo": True}),
        ("/v1/responses", {"store": False, "include": [], "user": "u"}, {"store": True, "max_tool_calls": 3}),
        ("/v1/messages", {"metadata": {"user_id": "u"}, "service_tier": "auto"}, {"container": "c", "mcp_servers": []}),
        ("/api/chat", {}, {"width": 5, "seed": 1}),
    ],
)
def test_what_asks_for_nothing_is_no_news(live: Live, path: str, silent: dict[str, Any], told: dict[str, Any]) -> None:
    _, body, _ = SAMPLES[path]
    assert "warnings" not in live.post(path, {**body, **silent}).json()
    warnings = live.post(path, {**body, **told}).json()["warnings"]
    assert [text.split('"')[1] for text in warnings] == list(told)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_native_options_may_be_fields_of_openais_apis(live: Live, path: str) -> None:
    _, body, _ = SAMPLES[path]
    options = {"min_p": 0.25, "samplers": ["top_k", "min_p"], "top_k": 9, "dry_multiplier": 0.5}
    found = seen(live, path, {**body, **options})
    told = found["told"][0][0]["sampling"]
    assert {name: told[name] for name in options} == options
    (warning,) = found["answer"]["warnings"]
    assert warning == 'option "dry_multiplier" has no effect: dry is not among samplers'
    for wrong in ({"min_p": "x"}, {"samplers": ["magic"]}, {"mirostat": 7}, {"logit_bias": {"the": 1}}):
        assert live.post(path, {**body, **wrong}).status_code == 400


def test_thoughts_of_a_model_that_has_none(live: Live) -> None:
    body = {"model": "thoughtless", "messages": HI, "stream": False}
    chat = live.post("/v1/chat/completions", {**body, "thinking_token_budget": 5}).json()
    assert chat["warnings"] == ['option "think_budget" has no effect: the model does not think']
    asked = live.post("/v1/messages", {**body, "max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 5}}).json()
    assert len(asked["warnings"]) == 2


# Options: what the runner is told, and what it does about it.

OPTIONS: dict[str, Any] = {
    "num_ctx": 128,
    "num_batch": 7,
    "num_gpu": 0,
    "main_gpu": 1,
    "use_mmap": False,
    "num_thread": 1,
    "num_keep": 9,
    "seed": 5,
    "num_predict": 2,
    "top_k": 3,
    "top_p": 0.3,
    "min_p": 0.3,
    "typical_p": 0.3,
    "repeat_last_n": 3,
    "temperature": 0.1,
    "repeat_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "mirostat": 2,
    "mirostat_tau": 2.0,
    "mirostat_eta": 0.5,
    "stop": ["x"],
    "top_n_sigma": 1.0,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.3,
    "dry_multiplier": 0.5,
    "dry_base": 1.2,
    "dry_allowed_length": 5,
    "dry_penalty_last_n": 9,
    "dry_sequence_breakers": ["x"],
    "samplers": ["top_k"],
    "logit_bias": {"5": 1.0},
    "min_tokens": 1,
    "ignore_eos": True,
    "think_budget": 5,
}


def test_every_option_has_a_sample() -> None:
    assert set(OPTIONS) == {item.name for item in dataclasses.fields(Options)}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_reaches_the_runner(live: Live, name: str) -> None:
    given = {name: OPTIONS[name]}
    if name in ("num_ctx", "num_batch", "num_gpu", "main_gpu", "use_mmap", "num_thread"):
        assert load_requirements(Options(**given), Settings()) != load_requirements(Options(), Settings())
        return
    body = {"model": "plain", "prompt": "Hi", "stream": False}
    first, second = (seen(live, "/api/generate", {**body, "options": options}) for options in ({}, given))
    assert (second["status"], "warnings" in second["answer"]) == (200, False)
    assert first["told"] != second["told"]


# By option: beside what it matters, and the value that changes something.
DRY = {"dry_multiplier": 2.0}
EFFECTS: dict[str, tuple[dict[str, Any], Any]] = {
    "temperature": ({}, 0.5),
    "top_k": ({}, 3),
    "top_p": ({}, 0.3),
    "min_p": ({}, 0.3),
    "typical_p": ({}, 0.3),
    "repeat_last_n": ({"repeat_penalty": 2.0}, 1),
    "repeat_penalty": ({}, 2.0),
    "presence_penalty": ({}, 1.0),
    "frequency_penalty": ({}, 1.0),
    "top_n_sigma": ({}, 0.5),
    "xtc_probability": ({}, 1.0),
    "xtc_threshold": ({"xtc_probability": 1.0}, 0.3),
    "dry_multiplier": ({}, 1.0),
    "dry_base": (DRY, 3.0),
    "dry_allowed_length": (DRY, 4),
    "dry_penalty_last_n": (DRY, 4),
    "dry_sequence_breakers": (DRY, ("5",)),
    "mirostat": ({}, 2),
    "mirostat_tau": ({"mirostat": 2}, 1.0),
    "mirostat_eta": ({"mirostat": 2}, 2.0),
    "samplers": ({"top_k": 3}, ("temperature",)),
    "logit_bias": ({}, {7: 5.0}),
}
TEXT = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 1, 2, 3]


def left(options: dict[str, Any]) -> dict[int, float]:
    """The distribution of the next token after a text that repeats, and after one token that was chosen."""
    given = SamplingOptions(**{"top_k": 0, "top_p": 1.0, "temperature": 1.0, "seed": 1} | options)
    breakers = {int(text): [(int(text),)] for text in given.dry_sequence_breakers if text.isdecimal()}
    sampler = Sampler(given, breakers=breakers)
    sampler.accept_many(TEXT)
    row = (np.random.default_rng(1).standard_normal(50) * 2).astype(np.float32)
    row[4] = row.max()
    (token,) = sample_batch([row], [sampler])
    assert isinstance(token, int)
    if given.mirostat:
        sampler.accept(token)
    return dict(zip(*(values.tolist() for values in distribution(row, sampler)), strict=True))


def test_every_sampling_option_has_an_effect_to_show() -> None:
    assert {*EFFECTS, "seed"} == set(SamplingOptions.__struct_fields__)


@pytest.mark.parametrize("name", EFFECTS)
def test_a_sampling_option_changes_what_is_drawn_from(name: str) -> None:
    beside, value = EFFECTS[name]
    assert left(beside) != left({**beside, name: value})
    assert left(beside) == left(beside)
    assert msgspec.json.decode(msgspec.json.encode(SamplingOptions(**{name: value})), type=SamplingOptions)


# Embeddings and rankings.

EMBEDDING: dict[str, tuple[type[BaseModel], dict[str, Any], dict[str, Any]]] = {
    "/api/embed": (
        embed.EmbedRequest,
        {"model": "bert", "input": "a b c d e f g h i j k l m n o p q r s t u v w x y z " * 3},
        {"model": "none", "input": "b", "truncate": False, "dimensions": 4, "options": {"num_ctx": 16}, "keep_alive": 77},
    ),
    "/api/embeddings": (
        embed.EmbeddingsRequest,
        {"model": "bert", "prompt": "a"},
        {"model": "none", "prompt": "b", "options": {"temperature": 1}, "keep_alive": 77},
    ),
    "/v1/embeddings": (
        embed.OpenAIEmbeddingsRequest,
        {"model": "bert", "input": "a"},
        {"model": "none", "input": "b", "dimensions": 4, "encoding_format": "base64"},
    ),
    "/api/rerank": (
        rerank.RerankRequest,
        {"model": "ranker", "query": "q", "documents": ["a b", "c " * 100]},
        {
            "model": "none",
            "query": "a",
            "documents": ["b"],
            "top_n": 1,
            "return_documents": True,
            "raw_scores": True,
            "truncate": False,
            "keep_alive": 77,
            "options": {"num_ctx": 16},
        },
    ),
}


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("vectors")
    server = Serving(folder)
    server.create("bert", write_bert(folder / "bert.gguf", n_ctx=64))
    server.create("ranker", write_bert(folder / "ranker.gguf", n_ctx=64, pooling=4, labels=[""]))
    with server.running():
        yield server


@pytest.mark.parametrize("path", EMBEDDING)
def test_fields_of_embeddings_are_done_or_refused(vectors: Serving, path: str) -> None:
    kind, body, samples = EMBEDDING[path]
    assert set(kind.model_fields) == set(samples)

    def found(body: dict[str, Any]) -> Any:
        reply = vectors.post(path, body)
        stays = [loaded.keep_alive for loaded in vectors.scheduler.models.values()]
        return reply.status_code, {k: v for k, v in lasting(reply.json()).items() if k != "id"}, stays

    first = found({**body, "keep_alive": 300} if "keep_alive" in samples else body)
    assert first[0] == 200
    for name, value in samples.items():
        assert first != found({**body, **({"keep_alive": 300} if "keep_alive" in samples else {}), name: value}), name
    warned = vectors.post(path, {**body, "colour": 1}).json()["warnings"]
    assert warned == ['field "colour" is not supported, and has no effect']


def test_options_of_answers_mean_nothing_to_embeddings(vectors: Serving) -> None:
    body = {"model": "bert", "input": "a", "options": {"temperature": 0.5, "num_thread": None, "colour": 1}}
    assert vectors.post("/api/embed", body).json()["warnings"] == [
        'option "colour" is not known, and has no effect',
        'option "temperature" has no effect here: no answer is written',
    ]
