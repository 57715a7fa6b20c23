"""The Anthropic-compatible routes: messages, and counting their tokens.

A request becomes a native one; an answer is a list of blocks in the order in which the model wrote them. An error in the
middle of a stream is sent as an error event. Tokens found in the cache are counted apart, as that API does.

Source: Anthropic's Messages API; product description, "POST /v1/messages".
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from puna.api import anthropic as api
from puna.api import go_json
from puna.api.generate import ChatRequest
from puna.prompt.output import Call, Part, Thinking, joined
from puna.server.answering.parts import Finished, Logprobs, Parts
from puna.server.apis.forced_call import forcing
from puna.server.checking.request import InferenceRequest
from puna.server.http.bodies import checked, read_json
from puna.server.http.caller import Caller
from puna.server.http.errors import anthropic_body
from puna.server.http.replies import EVENT_STREAM, Stream, json_response
from puna.server.pipeline import Pipeline

_REASONS = {"stop": "end_turn", "length": "max_tokens"}
_CHARS_PER_TOKEN = 4  # for the estimate that a stream begins with


async def messages(request: Request) -> Response:
    caller, pipeline = Caller.of(request), Pipeline.of(request)
    message = await read_json(request, api.MessagesRequest)
    plan = await pipeline.plan(await _inference_request(request, caller, message))
    parts = pipeline.answer(plan)
    head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": message.model}
    if message.stream:
        events = _events(parts, head, message.stop_sequences, n_estimated=_estimate(message))
        return Stream(events, EVENT_STREAM, _error_event, cache_control="no-cache")
    found, finished = await _collect(parts)
    blocks = [_block(part) for part in found]
    end = _end(finished, message.stop_sequences, has_called=any(isinstance(part, Call) for part in found))
    return json_response({**head, "content": blocks, **end, "usage": _usage(finished), **_warnings(finished)})


async def count_tokens(request: Request) -> Response:
    caller, pipeline = Caller.of(request), Pipeline.of(request)
    message = await read_json(request, api.CountRequest)
    plan = await pipeline.plan(await _inference_request(request, caller, message, truncate=False))
    return json_response({"input_tokens": await pipeline.count_tokens(plan)})


async def _inference_request(
    request: Request, caller: Caller, message: api.CountRequest, *, truncate: bool = True
) -> InferenceRequest:
    """These clients ask every model to think."""

    def native() -> ChatRequest:
        return ChatRequest.model_validate({**forcing(api.native_chat(message), message.forced_tool), "truncate": truncate})

    return InferenceRequest(caller, await checked(request, native), unused=message.unused, thinks_if_able=True)


def _estimate(message: api.CountRequest) -> int:
    """Roughly how many tokens the prompt has; the true number is known when the model has read it."""
    return len(message.model_dump_json(include={"messages", "system", "tools"})) // _CHARS_PER_TOKEN


async def _collect(parts: Parts) -> tuple[list[Part], Finished]:
    found: list[Part] = []
    async with aclosing(parts):
        async for part in parts:
            if isinstance(part, Finished):
                return joined(found), part
            if not isinstance(part, Logprobs):
                found.append(part)
    raise AssertionError("a generation ended without its last message")


def _block(part: Part) -> dict[str, Any]:
    match part:
        case Thinking(text):
            return {"type": "thinking", "thinking": text, "signature": ""}
        case Call():
            return {"type": "tool_use", "id": part.id, "name": part.name, "input": part.arguments}
        case text:
            return {"type": "text", "text": text}


def _empty(part: Part) -> Part:
    """The block of *part* before any of it has come."""
    return Thinking("") if isinstance(part, Thinking) else Call(part.name, {}, part.id) if isinstance(part, Call) else ""


def _delta(part: Part) -> dict[str, Any]:
    match part:
        case Thinking(text):
            return {"type": "thinking_delta", "thinking": text}
        case Call():
            return {"type": "input_json_delta", "partial_json": go_json.dumps(part.arguments).decode()}
        case text:
            return {"type": "text_delta", "text": text}


def _end(finished: Finished, stop_sequences: list[str], *, has_called: bool) -> dict[str, str | None]:
    """Why the answer ended. The model's own stop sequences are how it ends a turn; only the request's are named."""
    done = finished.done
    if has_called and done.reason == "stop":
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if done.stop_sequence in stop_sequences:
        return {"stop_reason": "stop_sequence", "stop_sequence": done.stop_sequence}
    return {"stop_reason": _REASONS.get(done.reason, "end_turn"), "stop_sequence": None}


def _warnings(finished: Finished) -> dict[str, Any]:
    """An extension: what of the request had no effect."""
    return {"warnings": finished.warnings} if finished.warnings else {}


def _usage(finished: Finished) -> dict[str, int]:
    done = finished.done
    usage = {
        "input_tokens": done.prompt_eval_count - done.cached_count,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": done.cached_count,
        "output_tokens": done.eval_count,
    }
    cut = {"truncated_input_tokens": finished.truncated_tokens, "truncated_messages": finished.truncated_messages}
    return usage | {name: count for name, count in cut.items() if count > 0}


async def _events(parts: Parts, head: dict[str, Any], stop_sequences: list[str], n_estimated: int) -> AsyncGenerator[bytes, None]:
    """Pieces of text or of thinking that follow one another share a block; a call is a block of its own."""
    start = {**head, "content": [], "stop_reason": None, "stop_sequence": None}
    start["usage"] = {"input_tokens": n_estimated, "output_tokens": 0}
    index, kind = -1, None
    has_started = has_called = False
    async with aclosing(parts):
        async for part in parts:
            if isinstance(part, Logprobs):
                continue
            if not has_started:
                has_started = True
                yield _event("message_start", message=start)
            if kind is not None and (isinstance(part, Finished | Call) or kind is not type(part)):
                yield _event("content_block_stop", index=index)
                kind = None
            if isinstance(part, Finished):
                end = _end(part, stop_sequences, has_called=has_called)
                yield _event("message_delta", delta=end, usage=_usage(part), **_warnings(part))
                yield _event("message_stop")
                return
            if kind is None:
                index, kind = index + 1, type(part)
                yield _event("content_block_start", index=index, content_block=_block(_empty(part)))
            has_called = has_called or isinstance(part, Call)
            yield _event("content_block_delta", index=index, delta=_delta(part))


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + go_json.dumps({"type": kind, **fields}) + b"\n\n"


def _error_event(text: str, status: int) -> bytes:
    return b"event: error\ndata: " + go_json.dumps(anthropic_body(text, status)) + b"\n\n"


routes = [
    Route("/v1/messages", messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
]
