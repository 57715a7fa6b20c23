"""``POST /v1/responses``: OpenAI's Responses API, without anything that would have to be stored.

The output is a list of items in the order in which the model wrote them: thinking, text, calls. Streamed and whole
answers are made by the same code: a whole one is the last event of a stream that nobody saw.

Source: OpenAI's API reference; product description, "POST /v1/responses".
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from puna.api import go_json
from puna.api import responses as api
from puna.api.generate import ChatRequest
from puna.errors import BadRequest
from puna.prompt.output import Call, Part, Thinking
from puna.server.answering.parts import AnswerPart, Finished, Logprobs, Parts
from puna.server.apis.forced_call import forcing
from puna.server.apis.openai.shape import DEFAULTS
from puna.server.checking.request import InferenceRequest
from puna.server.http.bodies import checked, read_json
from puna.server.http.caller import Caller
from puna.server.http.replies import EVENT_STREAM, Stream, json_response
from puna.server.pipeline import Pipeline

Event = dict[str, Any]


async def responses(request: Request) -> Response:
    caller, pipeline = Caller.of(request), Pipeline.of(request)
    message = await read_json(request, api.ResponsesRequest)
    native = await checked(request, lambda: ChatRequest.model_validate(forcing(api.native_chat(message), message.forced_tool)))
    if not native.messages:
        raise BadRequest("input must not be empty")
    parts = pipeline.answer(await pipeline.plan(InferenceRequest(caller, native, DEFAULTS, message.unused)))
    answer = _Answer(message)
    if message.stream:
        return Stream(_stream(parts, answer), EVENT_STREAM, answer.failure, cache_control="no-cache")
    async with aclosing(parts):
        async for part in parts:
            for _ in answer.add(part):
                pass
    return json_response(answer.body())


async def _stream(parts: Parts, answer: _Answer) -> AsyncGenerator[bytes, None]:
    async with aclosing(parts):
        async for part in parts:
            for event in answer.add(part):
                yield answer.encode(event)


class _Answer:
    """One response and the events that tell of its growth."""

    def __init__(self, request: api.ResponsesRequest) -> None:
        self._request = request
        self._id = _new_id("resp")
        self._created_at = int(time.time())
        self._output: list[dict[str, Any]] = []
        self._is_open = False  # whether the last item may still grow
        self._n_events = 0
        self._finished: Finished | None = None

    def add(self, part: AnswerPart) -> Iterator[Event]:
        if isinstance(part, Logprobs):
            return
        if self._finished is None and not self._output:
            yield {"type": "response.created", "response": self.body()}
            yield {"type": "response.in_progress", "response": self.body()}
        kind = _kind(part)
        if self._is_open and (kind in ("", "function_call") or self._output[-1]["type"] != kind):
            yield from self._close()
        if isinstance(part, Finished):
            self._finished = part
            body = self.body()
            yield {"type": f"response.{body['status']}", "response": body}
        elif isinstance(part, Call):
            yield from self._call(part)
        else:
            if not self._is_open:
                yield from self._open(kind)
            yield from self._grow(part.text if isinstance(part, Thinking) else part)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    def _open(self, kind: str) -> Iterator[Event]:
        self._is_open = True
        if kind == "reasoning":
            self._output.append({"id": _new_id("rs"), "type": kind, "summary": []})
        else:
            message = {"status": "in_progress", "role": "assistant", "content": []}
            self._output.append({"id": _new_id("msg"), "type": kind, **message})
        item = self._output[-1]
        yield {"type": "response.output_item.added", "output_index": self._place["output_index"], "item": {**item}}
        if kind == "reasoning":
            item["summary"] = [{"type": "summary_text", "text": ""}]
            yield {
                "type": "response.reasoning_summary_part.added",
                **self._place,
                "summary_index": 0,
                "part": {**item["summary"][0]},
            }
        else:
            item["content"] = [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]
            yield {"type": "response.content_part.added", **self._place, "content_index": 0, "part": {**item["content"][0]}}

    def _grow(self, text: str) -> Iterator[Event]:
        item = self._output[-1]
        if item["type"] == "reasoning":
            item["summary"][0]["text"] += text
            yield {"type": "response.reasoning_summary_text.delta", **self._place, "summary_index": 0, "delta": text}
        else:
            item["content"][0]["text"] += text
            yield {"type": "response.output_text.delta", **self._place, "content_index": 0, "delta": text, "logprobs": []}

    def _close(self) -> Iterator[Event]:
        self._is_open = False
        item = self._output[-1]
        if item["type"] == "reasoning":
            part = item["summary"][0]
            item["encrypted_content"] = part["text"]
            at = {**self._place, "summary_index": 0}
            yield {"type": "response.reasoning_summary_text.done", **at, "text": part["text"]}
            yield {"type": "response.reasoning_summary_part.done", **at, "part": part}
        else:
            part = item["content"][0]
            item["status"] = "completed"
            at = {**self._place, "content_index": 0}
            yield {"type": "response.output_text.done", **at, "text": part["text"], "logprobs": []}
            yield {"type": "response.content_part.done", **at, "part": part}
        yield {"type": "response.output_item.done", "output_index": self._place["output_index"], "item": item}

    def _call(self, call: Call) -> Iterator[Event]:
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        item = {"id": _new_id("fc"), "type": "function_call", "status": "in_progress", "call_id": call.id, "name": call.name}
        item["arguments"] = ""
        self._output.append(item)
        index = self._place["output_index"]
        yield {"type": "response.output_item.added", "output_index": index, "item": {**item}}
        item |= {"arguments": arguments, "status": "completed"}
        yield {"type": "response.function_call_arguments.delta", **self._place, "delta": arguments}
        yield {"type": "response.function_call_arguments.done", **self._place, "name": call.name, "arguments": arguments}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}

    def encode(self, event: Event) -> bytes:
        data = go_json.dumps({**event, "sequence_number": self._n_events})
        self._n_events += 1
        return b"event: " + str(event["type"]).encode() + b"\ndata: " + data + b"\n\n"

    def failure(self, text: str, status: int) -> bytes:
        """The last event when something broke on the way."""
        error = {"code": "server_error", "message": text}
        return self.encode({"type": "response.failed", "response": {**self.body(), "status": "failed", "error": error}})

    def body(self) -> dict[str, Any]:
        request, finished = self._request, self._finished
        was_cut = finished is not None and finished.done.reason == "length"
        status = "in_progress" if finished is None else "incomplete" if was_cut else "completed"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": int(time.time()) if finished else None,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if was_cut else None,
            "model": request.model,
            "previous_response_id": None,
            "instructions": request.instructions or None,
            "output": list(self._output) if finished else [],
            "error": None,
            "tools": request.tools,
            "tool_choice": request.tool_choice or "auto",
            "truncation": request.truncation or "auto",
            "parallel_tool_calls": True,
            "text": {"format": request.text.format or {"type": "text"}},
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "top_logprobs": 0,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "reasoning": {"effort": request.reasoning.effort or None, "summary": None},
            "usage": _usage(finished) if finished else None,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": None,
            "store": False,
            "background": False,
            "service_tier": "default",
            "metadata": {},
            "safety_identifier": None,
            "prompt_cache_key": None,
            **({"warnings": finished.warnings} if finished and finished.warnings else {}),
        }


def _kind(part: Part | Finished) -> str:
    match part:
        case Finished():
            return ""
        case Thinking():
            return "reasoning"
        case Call():
            return "function_call"
    return "message"


def _usage(finished: Finished) -> dict[str, Any]:
    done = finished.done
    cut = {"truncated_tokens": finished.truncated_tokens, "truncated_messages": finished.truncated_messages}
    return {
        "input_tokens": done.prompt_eval_count,
        "input_tokens_details": {"cached_tokens": done.cached_count} | {name: count for name, count in cut.items() if count > 0},
        "output_tokens": done.eval_count,
        "output_tokens_details": {"reasoning_tokens": done.thinking_count},
        "total_tokens": done.prompt_eval_count + done.eval_count,
    }


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


routes = [Route("/v1/responses", responses, methods=["POST"])]
