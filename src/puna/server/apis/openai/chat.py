"""``POST /v1/chat/completions``. Source: Ollama's OpenAI compatibility."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from puna.api import openai as api
from puna.api.generate import ChatRequest
from puna.errors import BadRequest
from puna.prompt.output import Call, Thinking
from puna.server.answering.parts import AnswerPart, Finished, Logprobs
from puna.server.apis.collecting import CompleteAnswer, collect_choices
from puna.server.apis.forced_call import forcing
from puna.server.apis.logprobs import reply_logprob
from puna.server.apis.openai.shape import DEFAULTS, Shape, chunks, end_of, stream_of
from puna.server.checking.request import InferenceRequest
from puna.server.http.bodies import checked, read_json
from puna.server.http.caller import Caller
from puna.server.http.replies import json_response
from puna.server.pipeline import Pipeline
from puna.wire import TokenLogprob


async def chat_completions(request: Request) -> Response:
    caller, pipeline = Caller.of(request), Pipeline.of(request)
    message = await read_json(request, api.ChatCompletionRequest)
    if not message.messages:
        raise BadRequest("[] is too short - 'messages'")
    native = await checked(request, lambda: _native_chat(message))
    plan = await pipeline.plan(InferenceRequest(caller, native, DEFAULTS, message.unused))
    shape = Shape.new("chatcmpl", "chat.completion", message.model)
    choices = pipeline.answers(plan, message.n)
    if message.stream:
        streamed = [_ChatChoice(index) for index in range(message.n)]
        with_usage = message.stream_options.include_usage
        return stream_of(chunks(choices, streamed, shape, "chat.completion.chunk", with_usage=with_usage))
    answers = await collect_choices(choices, message.n)
    shaped = [_choice(index, whole) for index, whole in enumerate(answers)]
    return json_response(shape.message(shaped, **end_of([whole.finished for whole in answers])))


def _choice(index: int, whole: CompleteAnswer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": whole.text}
    if whole.thinking:
        message["reasoning"] = whole.thinking
    if whole.calls:
        message["tool_calls"] = [_call(call, number) for number, call in enumerate(whole.calls)]
    reason = _reason(whole.finished, has_called=bool(whole.calls))
    return {"index": index, "message": message, "finish_reason": reason, **_scores(whole.logprobs)}


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

    def chunk(self, part: AnswerPart) -> dict[str, Any] | None:
        """What is to be sent of a part, if anything."""
        role = self._role
        match part:
            case Logprobs(entries):
                self._held += entries
                return None
            case Finished():
                reason = _reason(part, has_called=self._n_calls > 0)
                return self._made({**role, "content": ""} if role else {}, reason)
            case Thinking(text):
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


routes = [Route("/v1/chat/completions", chat_completions, methods=["POST"])]
