"""Replies of the native API: timestamps, counts, and the lines of a stream."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from pydantic import BaseModel
from starlette.responses import Response

from puna.api import go_json
from puna.api.generate import ReplyCall, ReplyFunction, ReplyLogprob
from puna.prompt.output import Call, Thinking
from puna.server.answering.parts import Finished, Logprobs, Parts
from puna.server.apis.collecting import collect
from puna.server.apis.logprobs import reply_logprob
from puna.server.http.errors import JSON_CONTENT_TYPE, native_body
from puna.server.http.replies import NDJSON, Stream
from puna.wire import TokenLogprob


def now() -> str:
    """RFC 3339 with nanoseconds, in UTC."""
    seconds, nanoseconds = divmod(time.time_ns(), 10**9)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{nanoseconds:09d}Z"


def body_of(reply: BaseModel) -> bytes:
    return go_json.dumps(reply.model_dump(exclude_none=True))


def respond(reply: BaseModel) -> Response:
    return Response(body_of(reply), media_type=JSON_CONTENT_TYPE)


def error_line(text: str, status: int) -> bytes:
    return go_json.dumps(native_body(text, status)) + b"\n"


def metrics(finished: Finished) -> dict[str, int | None]:
    """Counts and durations; what is zero is left out."""
    done = finished.done
    counts = {
        "total_duration": finished.total_ns,
        "load_duration": finished.load_ns,
        "prompt_eval_count": done.prompt_eval_count,
        "prompt_eval_duration": done.prompt_eval_duration,
        "eval_count": done.eval_count,
        "eval_duration": done.eval_duration,
        "cached_count": done.cached_count,
        "truncated_count": finished.truncated_tokens,
        "truncated_messages": finished.truncated_messages,
    }
    return {name: count if count > 0 else None for name, count in counts.items()}


MakeReply = Callable[..., BaseModel]


async def answer(parts: Parts, reply: MakeReply, *, stream: bool) -> Response:
    """The answer as lines or as one message. *reply* makes a message from a text, some thinking and further fields."""
    if stream:
        return Stream(_lines(parts, reply), NDJSON, error_line)
    whole = await collect(parts)
    calls = {"tool_calls": [reply_call(call, index) for index, call in enumerate(whole.calls)]} if whole.calls else {}
    return respond(reply(whole.text, whole.thinking, **calls, **_scores(whole.logprobs), **final_fields(whole.finished)))


async def _lines(parts: Parts, reply: MakeReply) -> AsyncGenerator[bytes, None]:
    """One line per piece, then the line with the counts. Logprobs come with the next line."""
    n_calls = 0
    held: list[TokenLogprob] = []
    async with aclosing(parts):
        async for part in parts:
            if isinstance(part, Logprobs):
                held += part.entries
                continue
            scores = _scores(held)
            held.clear()
            match part:
                case Finished():
                    yield body_of(reply("", "", **scores, **final_fields(part))) + b"\n"
                case Thinking(text):
                    yield body_of(reply("", text, **scores)) + b"\n"
                case Call():
                    yield body_of(reply("", "", **scores, tool_calls=[reply_call(part, n_calls)])) + b"\n"
                    n_calls += 1
                case text:
                    yield body_of(reply(text, "", **scores)) + b"\n"


def _scores(entries: list[TokenLogprob]) -> dict[str, list[ReplyLogprob]]:
    return {"logprobs": [reply_logprob(entry) for entry in entries]} if entries else {}


def reply_call(call: Call, index: int) -> ReplyCall:
    return ReplyCall(id=call.id, function=ReplyFunction(index=index, name=call.name, arguments=call.arguments))


def final_fields(finished: Finished) -> dict[str, Any]:
    context, warnings = finished.done.tokens or None, finished.warnings or None
    return {"done": True, "done_reason": finished.done.reason, "context": context, "warnings": warnings, **metrics(finished)}
