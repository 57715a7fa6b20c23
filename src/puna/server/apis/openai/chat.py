"""The OpenAI-compatible routes: chat completions, completions and models.

A request becomes a native one; an answer gets OpenAI's shape. Where Ollama forces temperature and top_p to 1 when they
are absent, a model's own parameters count here. An error in the middle of a stream is sent as an error event.

Source: Ollama's OpenAI compatibility.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from puna.api import go_json
from puna.api import openai as api
from puna.api.generate import ChatRequest, GenerateRequest
from puna.errors import BadRequest, InvalidName, NotFound
from puna.prompt.output import Call, Thought
from puna.server.answering.generation import Choices, Finished, Job, Logprobs, ScoredPart, run_choices
from puna.server.apis.native.reply import Whole, gather_choices, reply_logprob
from puna.server.checking.check import Caller, chat_job, generate_job
from puna.server.http.bodies import EVENT_STREAM, Stream, checked, json_response, read_json
from puna.server.http.errors import openai_body
from puna.server.prompting.constraint import forcing
from puna.server.prompting.conversation import has_template
from puna.store.models.model import StoredModel
from puna.store.names import Name
from puna.wire import TokenLogprob

FINGERPRINT = "fp_ollama"
DEFAULTS = {"temperature": 1.0, "top_p": 1.0}  # of OpenAI's API, where neither the request nor the model says anything
_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Shape:
    """What all messages of one answer share."""

    id: str
    kind: str
    model: str
    created: int

    @classmethod
    def new(cls, prefix: str, kind: str, model: str) -> Shape:
        return cls(f"{prefix}-{secrets.token_hex(12)}", kind, model, int(time.time()))

    def message(self, choices: list[dict[str, Any]], kind: str = "", **extra: Any) -> dict[str, Any]:
        head = {"id": self.id, "object": kind or self.kind, "created": self.created, "model": self.model}
        return {**head, "system_fingerprint": FINGERPRINT, "choices": choices, **extra}


async def chat_completions(request: Request) -> Response:
    caller = Caller.of(request)
    message = await read_json(request, api.ChatCompletionRequest)
    if not message.messages:
        raise BadRequest("[] is too short - 'messages'")
    native = await checked(request, lambda: _native_chat(message))
    model = await caller.open(message.model)
    job = chat_job(caller, model, native, DEFAULTS, message.unused)
    shape = Shape.new("chatcmpl", "chat.completion", message.model)
    choices = run_choices(caller.scheduler, job, message.n)
    if message.stream:
        return _stream(_chat_events(choices, shape, message))
    answers = await gather_choices(choices, message.n)
    said = [_choice(index, whole) for index, whole in enumerate(answers)]
    return json_response(shape.message(said, **_end([whole.finished for whole in answers])))


def _choice(index: int, whole: Whole) -> dict[str, Any]:
    said: dict[str, Any] = {"role": "assistant", "content": whole.text}
    if whole.thought:
        said["reasoning"] = whole.thought
    if whole.calls:
        said["tool_calls"] = [_call(call, number) for number, call in enumerate(whole.calls)]
    reason = _reason(whole.finished, has_called=bool(whole.calls))
    return {"index": index, "message": said, "finish_reason": reason, **_scores(whole.logprobs)}


def _native_chat(message: api.ChatCompletionRequest) -> ChatRequest:
    given = {
        "model": message.model,
        "messages": api.native_messages(message.messages),
        "tools": message.offered_tools,
        "options": message.options,
        "think": api.think(message),
        "format": _format(message.response_format),
        "logprobs": message.logprobs,
        "top_logprobs": message.top_logprobs,
        "regex": message.regex,
        "lark": message.lark,
        "add_generation_prompt": message.add_generation_prompt,
        "continue_final_message": message.continue_final_message,
    }
    return ChatRequest.model_validate(forcing(given, message.forced_tool))


def _scores(entries: list[TokenLogprob]) -> dict[str, Any]:
    if not entries:
        return {}
    content = [{"top_logprobs": [], **reply_logprob(entry).model_dump(exclude_none=True)} for entry in entries]
    return {"logprobs": {"content": content}}


def _format(response_format: dict[str, Any] | None) -> Any:
    match response_format:
        case {"type": "json_object"}:
            return "json"
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return schema
    return None


def _call(call: Call, index: int) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"index": index, "id": call.id, "type": "function", "function": function}


def _reason(finished: Finished, *, has_called: bool) -> str:
    reason = finished.done.reason
    return "tool_calls" if has_called and reason == "stop" else reason


class _ChatChoice:
    """One streamed choice: the role comes with its first chunk only, the finish reason in a chunk of its own, and logprobs
    with the next chunk.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._role = {"role": "assistant"}
        self._held: list[TokenLogprob] = []
        self._n_calls = 0

    def chunk(self, part: ScoredPart) -> dict[str, Any] | None:
        """What is to be sent of a part, if anything."""
        role = self._role
        match part:
            case Logprobs(entries):
                self._held += entries
                return None
            case Finished():
                reason = _reason(part, has_called=self._n_calls > 0)
                return self._made({**role, "content": ""} if role else {}, reason)
            case Thought(text):
                return self._made({**role, "reasoning": text})
            case Call():
                self._n_calls += 1
                return self._made({**role, "tool_calls": [_call(part, self._n_calls - 1)]})
            case text:
                return self._made({**role, "content": text})

    def _made(self, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": self._index, "delta": delta, **_scores(self._held), "finish_reason": reason}
        self._held, self._role = [], {}
        return choice


async def _chat_events(choices: Choices, shape: Shape, message: api.ChatCompletionRequest) -> AsyncGenerator[bytes, None]:
    answers = [_ChatChoice(index) for index in range(message.n)]
    async with aclosing(_events(choices, answers, shape, "chat.completion.chunk", message)) as events:
        async for event in events:
            yield event


async def _events(
    choices: Choices,
    answers: Sequence[_ChatChoice | _TextChoice],
    shape: Shape,
    kind: str,
    message: api.ChatCompletionRequest | api.CompletionRequest,
) -> AsyncGenerator[bytes, None]:
    """Chunks of all choices as they come; the usage, if it is wanted, when all have ended. Warnings come with the last."""
    ended: list[Finished] = []
    async with aclosing(choices):
        async for index, part in choices:
            chunk = answers[index].chunk(part)
            if isinstance(part, Finished):
                ended.append(part)
            is_last = len(ended) == len(answers)
            if chunk is not None:
                yield _event(shape.message([chunk], kind, **(_warnings(ended) if is_last else {})))
            if is_last:
                if message.stream_options.include_usage:
                    yield _event(shape.message([], kind, usage=_usage(ended)))
                yield _DONE


async def completions(request: Request) -> Response:
    caller = Caller.of(request)
    message = await read_json(request, api.CompletionRequest)
    model = await caller.open(message.model)
    given: dict[str, Any] = {
        "model": message.model,
        "prompt": message.prompt,
        "suffix": message.suffix,
        "options": await checked(request, lambda: message.options),
    }
    given |= {"logprobs": message.logprobs is not None, "top_logprobs": message.logprobs or 0}
    given |= {"regex": message.regex, "lark": message.lark, "raw": not message.suffix and not has_template(model)}
    native = GenerateRequest.model_validate(given)
    job = generate_job(caller, model, native, DEFAULTS, message.unused)
    shape = Shape.new("cmpl", "text_completion", message.model)
    if not message.prompt:
        return await _loaded(caller, job, shape)
    choices = run_choices(caller.scheduler, job, message.n)
    if message.stream:
        texts = [_TextChoice(index) for index in range(message.n)]
        return _stream(_events(choices, texts, shape, shape.kind, message))
    answers = await gather_choices(choices, message.n)
    said = [
        {"text": whole.text, "index": index, **_text_scores(whole.logprobs), "finish_reason": whole.finished.done.reason}
        for index, whole in enumerate(answers)
    ]
    return json_response(shape.message(said, **_end([whole.finished for whole in answers])))


async def _loaded(caller: Caller, job: Job, shape: Shape) -> Response:
    """An empty prompt only loads the model."""
    await caller.load(job)
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    return json_response(shape.message([{"text": "", "index": 0, "finish_reason": "load"}], usage=usage))


def _text_scores(entries: list[TokenLogprob], begin: int = 0) -> dict[str, Any]:
    """Parallel lists, as this older API has them; offsets are in characters from the answer's beginning."""
    if not entries:
        return {}
    tokens = [entry.text.decode("utf-8", "replace") for entry in entries]
    return {
        "logprobs": {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [{other.text.decode("utf-8", "replace"): other.logprob for other in entry.top} for entry in entries],
            "text_offset": list(accumulate(map(len, tokens[:-1]), initial=begin)),
        }
    }


class _TextChoice:
    """One streamed choice of plain text; thoughts and calls are no part of it."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._held: list[TokenLogprob] = []
        self._n_characters = 0

    def chunk(self, part: ScoredPart) -> dict[str, Any] | None:
        match part:
            case Logprobs(entries):
                self._held += entries
            case Finished():
                return self._made("", part.done.reason)
            case str(text):
                return self._made(text)
        return None

    def _made(self, text: str, reason: str | None = None) -> dict[str, Any]:
        scores = _text_scores(self._held, self._n_characters)
        self._held, self._n_characters = [], self._n_characters + len(text)
        return {"text": text, "index": self._index, **scores, "finish_reason": reason}


async def list_models(request: Request) -> Response:
    caller = Caller.of(request)
    models = await asyncio.to_thread(caller.store.list)
    return json_response({"object": "list", "data": [_model(model, model.name) for model in models]})


async def retrieve_model(request: Request) -> Response:
    caller = Caller.of(request)
    name = request.path_params["model"]
    try:
        model = await asyncio.to_thread(caller.store.get, name)
    except InvalidName as error:
        raise NotFound(f"model '{name}' not found") from error
    return json_response(_model(model, name))


def _model(model: StoredModel, name: str) -> dict[str, Any]:
    owner = Name.parse(model.full_name).namespace
    return {"id": name, "object": "model", "created": int(model.modified_at), "owned_by": owner}


def _end(answers: Sequence[Finished]) -> dict[str, Any]:
    return {"usage": _usage(answers), **_warnings(answers)}


def _warnings(answers: Sequence[Finished]) -> dict[str, Any]:
    """All choices have the same, those of their request."""
    return {"warnings": list(answers[0].warnings)} if answers[0].warnings else {}


def _usage(answers: Sequence[Finished]) -> dict[str, Any]:
    """All choices share one prompt, which counts once. That the others found it in the cache was this request's own doing."""
    first, done = answers[0], [answer.done for answer in answers]
    n_prompt, n_generated = first.done.prompt_eval_count, sum(one.eval_count for one in done)
    usage: dict[str, Any] = {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_generated,
        "total_tokens": n_prompt + n_generated,
    }
    details = {
        "cached_tokens": min(one.cached_count for one in done),
        "truncated_tokens": first.truncated_tokens,
        "truncated_messages": first.truncated_messages,
    }
    if any(details.values()):
        usage["prompt_tokens_details"] = {name: count for name, count in details.items() if count > 0}
    n_thoughts = sum(one.thought_count for one in done)
    if n_thoughts > 0:
        usage["completion_tokens_details"] = {"reasoning_tokens": n_thoughts}
    return usage


def _stream(events: AsyncGenerator[bytes, None]) -> Stream:
    return Stream(events, EVENT_STREAM, lambda text, status: _event(openai_body(text, status)), cache_control="no-cache")


def _event(message: dict[str, Any]) -> bytes:
    return b"data: " + go_json.dumps(message) + b"\n\n"


routes = [
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/models", list_models, methods=["GET"]),
    Route("/v1/models/{model}", retrieve_model, methods=["GET"]),
]
