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
from collections.abc import AsyncGenerator
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
from puna.server.bodies import EVENT_STREAM, Stream, checked, json_response, read_json
from puna.server.constraint import forcing
from puna.server.errors import openai_body
from puna.server.generation import Finished, Job, Logprobs, ScoredParts, run_scored
from puna.server.native import gather, reply_logprob
from puna.server.prompts import has_template
from puna.server.requests import Caller, chat_job, generate_job
from puna.store.model import StoredModel
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
    job = chat_job(caller, model, native, DEFAULTS)
    shape = Shape.new("chatcmpl", "chat.completion", message.model)
    if message.stream:
        return _stream(_chat_events(run_scored(caller.scheduler, job), shape, message.stream_options.include_usage))
    whole = await gather(run_scored(caller.scheduler, job))
    said: dict[str, Any] = {"role": "assistant", "content": whole.text}
    if whole.thought:
        said["reasoning"] = whole.thought
    if whole.calls:
        said["tool_calls"] = [_call(call, index) for index, call in enumerate(whole.calls)]
    choice = {"index": 0, "message": said, "finish_reason": _reason(whole.finished, has_called=bool(whole.calls))}
    choice |= _scores(whole.logprobs)
    return json_response(shape.message([choice], usage=_usage(whole.finished), **_warnings(whole.finished)))


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


async def _chat_events(parts: ScoredParts, shape: Shape, include_usage: bool) -> AsyncGenerator[bytes, None]:
    """The role comes with the first chunk only, the finish reason in a chunk of its own; logprobs with the next chunk."""
    held: list[TokenLogprob] = []

    def chunk(delta: dict[str, Any], reason: str | None = None, **extra: Any) -> bytes:
        choice = {"index": 0, "delta": delta, **_scores(held), "finish_reason": reason}
        held.clear()
        return _event(shape.message([choice], "chat.completion.chunk", **extra))

    role = {"role": "assistant"}
    n_calls = 0
    async with aclosing(parts):
        async for part in parts:
            if isinstance(part, Logprobs):
                held += part.entries
                continue
            if isinstance(part, str):
                yield chunk({**role, "content": part})
            elif isinstance(part, Thought):
                yield chunk({**role, "reasoning": part.text})
            elif isinstance(part, Call):
                yield chunk({**role, "tool_calls": [_call(part, n_calls)]})
                n_calls += 1
            else:
                reason = _reason(part, has_called=n_calls > 0)
                yield chunk({**role, "content": ""} if role else {}, reason, **_warnings(part))
                if include_usage:
                    yield _event(shape.message([], "chat.completion.chunk", usage=_usage(part)))
                yield _DONE
            role = {}


async def completions(request: Request) -> Response:
    caller = Caller.of(request)
    message = await read_json(request, api.CompletionRequest)
    model = await caller.open(message.model)
    given: dict[str, Any] = {
        "model": message.model,
        "prompt": message.prompt,
        "suffix": message.suffix,
        "options": message.options,
    }
    given |= {"logprobs": message.logprobs is not None, "top_logprobs": message.logprobs or 0}
    given |= {"regex": message.regex, "lark": message.lark, "raw": not message.suffix and not has_template(model)}
    native = GenerateRequest.model_validate(given)
    job = generate_job(caller, model, native, DEFAULTS)
    shape = Shape.new("cmpl", "text_completion", message.model)
    if not message.prompt:
        return await _loaded(caller, job, shape)
    if message.stream:
        return _stream(_text_events(run_scored(caller.scheduler, job), shape, message.stream_options.include_usage))
    whole = await gather(run_scored(caller.scheduler, job))
    choice = {"text": whole.text, "index": 0, **_text_scores(whole.logprobs), "finish_reason": whole.finished.done.reason}
    return json_response(shape.message([choice], usage=_usage(whole.finished)))


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


async def _text_events(parts: ScoredParts, shape: Shape, include_usage: bool) -> AsyncGenerator[bytes, None]:
    held: list[TokenLogprob] = []
    n_characters = 0

    def chunk(text: str, reason: str | None = None) -> bytes:
        choice = {"text": text, "index": 0, **_text_scores(held, n_characters), "finish_reason": reason}
        held.clear()
        return _event(shape.message([choice]))

    async with aclosing(parts):
        async for part in parts:
            if isinstance(part, Logprobs):
                held += part.entries
            elif isinstance(part, str):
                yield chunk(part)
                n_characters += len(part)
            elif isinstance(part, Finished):
                yield chunk("", part.done.reason)
                if include_usage:
                    yield _event(shape.message([], usage=_usage(part)))
                yield _DONE


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


def _warnings(finished: Finished) -> dict[str, Any]:
    """An extension: what of the request had no effect."""
    return {"warnings": finished.warnings} if finished.warnings else {}


def _usage(finished: Finished) -> dict[str, Any]:
    done = finished.done
    usage: dict[str, Any] = {
        "prompt_tokens": done.prompt_eval_count,
        "completion_tokens": done.eval_count,
        "total_tokens": done.prompt_eval_count + done.eval_count,
    }
    details = {
        "cached_tokens": done.cached_count,
        "truncated_tokens": finished.truncated_tokens,
        "truncated_messages": finished.truncated_messages,
    }
    if any(details.values()):
        usage["prompt_tokens_details"] = {name: count for name, count in details.items() if count > 0}
    if done.thought_count > 0:
        usage["completion_tokens_details"] = {"reasoning_tokens": done.thought_count}
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
